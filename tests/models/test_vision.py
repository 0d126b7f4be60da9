"""The vision model: that a step does not depend on how the batch is cut, and that any timm backbone fits."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.config.schema import VisionConfig
from hpctrain.errors import ConfigError
from hpctrain.models.spec import DataFacts, make_parameter_groups
from hpctrain.models.vision import SPEC, VisionModel, build_vision

TINY = VisionConfig(backbone="resnet10t", embedding_dim=16, image_size=[32, 32])
FACTS = DataFacts(num_identities=4, behaviours=["running", "falling"])


@dataclass(frozen=True)
class Samples:
    image_BCHW: Tensor
    identity_B: Tensor
    behaviour_BK: Tensor
    has_behaviour_B: Tensor
    weight_B: Tensor
    sample_id_B: Tensor

    def __getitem__(self, index: Tensor) -> "Samples":
        return Samples(**{name: value[index] for name, value in vars(self).items()})


def make_samples(num: int = 8, size: tuple[int, int] = (32, 32), num_behaviours: int = 2) -> Samples:
    generator = torch.Generator().manual_seed(0)
    return Samples(
        image_BCHW=torch.randint(0, 256, (num, 3, *size), dtype=torch.uint8, generator=generator),
        identity_B=torch.arange(num) % 5 - 1,
        behaviour_BK=torch.randint(0, 2, (num, num_behaviours), generator=generator).float(),
        has_behaviour_B=(torch.arange(num) % 3 > 0).float(),
        weight_B=torch.ones(num),
        sample_id_B=torch.arange(num),
    )


def build(config: VisionConfig = TINY, facts: DataFacts = FACTS) -> VisionModel:
    torch.manual_seed(0)
    return build_vision(config, facts)


def freeze_batchnorm(model: VisionModel) -> VisionModel:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    return model


def gradients(model: VisionModel, parts: list[Samples]) -> dict[str, Tensor]:
    model.zero_grad()
    for part in parts:
        sum(model(part).values(), torch.zeros(())).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_do_not_depend_on_how_the_batch_is_cut() -> None:
    samples = make_samples()
    model = freeze_batchnorm(build().train().double())
    whole = gradients(model, [samples])
    cut = gradients(model, [samples[torch.tensor([0, 5, 6])], samples[torch.tensor([1, 2, 3, 4, 7])]])
    assert whole.keys() == dict(model.named_parameters()).keys() == cut.keys()
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-9, atol=1e-12)


def test_all_parameters_get_a_gradient_from_a_batch_without_any_label() -> None:
    samples = replace(make_samples(), identity_B=torch.full((8,), -1), has_behaviour_B=torch.zeros(8))
    model = build().train()
    sums = model(samples)
    assert {name: value.item() for name, value in sums.items()} == {"identity": 0.0, "behaviour": 0.0}
    found = gradients(model, [samples])
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all((gradient == 0).all() for gradient in found.values())


def test_padding_adds_nothing_to_the_sums() -> None:
    samples = make_samples()
    model = freeze_batchnorm(build().train().double())
    padded = replace(samples, weight_B=torch.tensor([1.0] * 6 + [0.0] * 2))
    kept = samples[torch.arange(6)]
    for name, value in model(kept).items():
        torch.testing.assert_close(model(padded)[name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("facts", "terms"),
    [
        (DataFacts(4, []), {"identity"}),
        (DataFacts(1, ["running"]), {"behaviour"}),
        (DataFacts(2, ["running"]), {"identity", "behaviour"}),
    ],
)
def test_terms_are_those_that_the_data_have(facts: DataFacts, terms: set[str]) -> None:
    samples = make_samples(num_behaviours=len(facts.behaviours))
    samples = replace(samples, identity_B=samples.identity_B.clamp(max=facts.num_identities - 1))
    model = build(facts=facts)
    assert set(model(samples)) == set(model.term_weights) == terms


def test_data_without_any_label_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 identities and no behaviours"):
        build(facts=DataFacts(1, []))


def test_loss_falls_on_a_batch_that_is_seen_again_and_again() -> None:
    samples = make_samples()
    model = build(replace(TINY, margin_scale=16.0)).train()
    optimizer = torch.optim.AdamW(make_parameter_groups(model, 0.05), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = sum(model(samples).values(), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_images_are_normalised_as_the_backbone_was_pretrained() -> None:
    config = replace(TINY, backbone="vit_tiny_patch16_224")  # mean and std 0.5, not ImageNet's
    model = build(config).eval()
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32).eval()
    backbone.load_state_dict(model.backbone.state_dict())
    image = make_samples(2).image_BCHW
    with torch.no_grad():
        expected = model.embedding(backbone((image / 255 - 0.5) / 0.5))
        torch.testing.assert_close(model.embed(image), expected)


@pytest.mark.parametrize(
    "backbone",
    [
        "convnext_atto",
        "vit_tiny_patch16_224",
        "mobilenetv3_small_050",
        "swin_tiny_patch4_window7_224",
        "vgg11",
    ],
)
def test_every_parameter_of_any_backbone_gets_a_gradient(backbone: str) -> None:
    size = (64, 32)
    model = build(replace(TINY, backbone=backbone, image_size=list(size))).train()
    samples = make_samples(4, size)
    assert gradients(model, [samples]).keys() == dict(model.named_parameters()).keys()
    assert model.eval().eval_outputs(samples)["embedding_BD"].shape == (4, 16)


def test_unknown_backbone_names_close_matches() -> None:
    with pytest.raises(ConfigError, match=r"convnext_bass(.|\n)*convnext_base"):
        build(replace(TINY, backbone="convnext_bass"))


def test_unknown_tag_of_a_backbone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"resnet50.nonsense(.|\n)*tag \(nonsense\)"):
        build(replace(TINY, backbone="resnet50.nonsense"))


def test_stochastic_depth_is_refused_where_the_backbone_has_none() -> None:
    with pytest.raises(ConfigError, match=r"drop_path_rate=0.1"):
        build(replace(TINY, backbone="vgg11", drop_path_rate=0.1))


def test_image_size_that_the_backbone_cannot_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="32×24 pixels"):
        build(replace(TINY, backbone="inception_v3", image_size=[32, 24]))


def test_drop_path_rate_reaches_the_backbone() -> None:
    model = build(replace(TINY, drop_path_rate=0.5))
    assert any(getattr(m, "drop_prob", 0.0) == 0.5 for m in model.backbone.modules())


def test_pretrained_weights_are_loaded_and_their_classifier_left_out(tmp_path: Path) -> None:
    published = timm.create_model("resnet10t")
    save_file(published.state_dict(), tmp_path / "weights.safetensors")
    model = build(replace(TINY, pretrained=str(tmp_path / "weights.safetensors")))
    own = model.backbone.state_dict()
    assert own.keys() == {k for k in published.state_dict() if not k.startswith("fc.")}
    assert all(torch.equal(value, published.state_dict()[name]) for name, value in own.items())


def test_position_embeddings_of_another_image_size_are_resampled(tmp_path: Path) -> None:
    published = timm.create_model("vit_tiny_patch16_224", img_size=64)
    save_file(published.state_dict(), tmp_path / "weights.safetensors")
    config = replace(TINY, backbone="vit_tiny_patch16_224", pretrained=str(tmp_path / "weights.safetensors"))
    backbone = build(config).backbone
    assert backbone.get_parameter("pos_embed").shape == (1, 1 + 2 * 2, 192)
    torch.testing.assert_close(backbone.get_parameter("cls_token"), published.get_parameter("cls_token"))


def test_weights_of_another_backbone_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    save_file(timm.create_model("resnet18").state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"\d+ missing \(conv1.0.weight, .*unexpected .*of another shape"):
        build(replace(TINY, pretrained=str(tmp_path / "weights.safetensors")))


def test_missing_weights_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        build(replace(TINY, pretrained=str(tmp_path / "none.safetensors")))


def test_norms_biases_and_position_embeddings_do_not_decay() -> None:
    model = build(replace(TINY, backbone="vit_tiny_patch16_224"))
    decayed, plain = make_parameter_groups(model, 0.05)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.05, 0.0)
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    plain_names = {names[id(p)] for p in plain["params"]}
    assert {"backbone.pos_embed", "backbone.cls_token", "embedding.norm.weight"} <= plain_names
    assert all(n.endswith(("bias", "norm.weight", "norm1.weight", "norm2.weight", "_embed", "cls_token"))
               for n in plain_names)  # fmt: skip
    assert "identity_head.weight" in {names[id(p)] for p in decayed["params"]}


def test_same_seed_gives_the_same_parameters_in_the_same_order() -> None:
    first, second = build().state_dict(), build().state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_evaluation_does_not_depend_on_order_and_leaves_padding_out() -> None:
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(60, 8)).astype(np.float32)
    outputs = {
        "embedding_BD": embedding / np.linalg.norm(embedding, axis=1, keepdims=True),
        "identity_B": rng.integers(-1, 6, 60),
        "weight_B": np.ones(60, np.float32),
        "sample_id_B": np.arange(60),
        "behaviour_logits_BK": rng.normal(size=(60, 2)),
        "behaviour_BK": (rng.random((60, 2)) < 0.4).astype(np.float32),
        "has_behaviour_B": (rng.random(60) < 0.7).astype(np.float32),
    }
    expected = SPEC.evaluate(outputs)
    names = ["tar_at_far_1e-01", "tar_at_far_1e-02", "tar_at_far_1e-03", "verification_auc", "rank1"]
    assert list(expected) == [*names, "behaviour_map"]
    mixed = np.r_[rng.permutation(60), 0, 0, 7]
    gathered = {name: value[mixed] for name, value in outputs.items()}
    gathered["weight_B"] = np.r_[np.ones(60), np.zeros(3)].astype(np.float32)
    assert SPEC.evaluate(gathered) == pytest.approx(expected, rel=1e-6)
