"""What leaves a run: files that plain timm reads, as the docs show it, and embeddings as Parquet."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.checkpoint import store, writer
from hpctrain.config.load import save_config
from hpctrain.config.schema import Config, ImageDataConfig, OptimConfig, VisionConfig
from hpctrain.data.prepare import pack_images
from hpctrain.errors import CheckpointError, ConfigError, DataError
from hpctrain.export import main
from hpctrain.export.embeddings import export_embeddings
from hpctrain.export.model import export_model
from hpctrain.models.spec import DataFacts
from hpctrain.models.vision import VisionModel, build_vision
from tests.helpers.ranks import run_ranks

HEIGHT, WIDTH = 48, 32
DOCS = Path(__file__).parents[1] / "docs" / "your_model.md"


def make_model(backbone: str, seed: int) -> VisionModel:
    """Return a model whose norms have seen images: folding them is work, and embeddings differ by image."""
    torch.manual_seed(seed)
    config = VisionConfig(backbone=backbone, embedding_dim=16, image_size=[HEIGHT, WIDTH])
    model = build_vision(config, DataFacts(3, ["running", "falling"])).train()
    torch.nn.init.normal_(model.embedding.norm.weight, 1.0, 0.2)
    torch.nn.init.normal_(model.embedding.norm.bias, std=0.2)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        model.embed(torch.stack([as_tensor(make_image(100 + i)) for i in range(16)]))
    return model.eval()


def save_run(run: Path, states: dict[int, dict[str, Any]], backbone: str, ema_decay: float | None) -> Path:
    """Write a run folder with a checkpoint per step, by the real writer."""

    def save(rank: int, world: int) -> None:
        for step, state in states.items():
            writer.save(
                run / "checkpoints", step=step, attempt="1_0_0", state=state, facts={},
                group=dist.group.WORLD, timeout_s=30, layout={},
            )  # fmt: skip

    run.mkdir(parents=True)
    model = VisionConfig(backbone=backbone, embedding_dim=16, image_size=[HEIGHT, WIDTH], drop_path_rate=0.1)
    # The weights that the run began with need not be there any more.
    model.pretrained = "/nowhere.safetensors"
    optim = OptimConfig(ema_decay=ema_decay)
    save_config(Config(model=model, optim=optim, data=ImageDataConfig(root="data")), run / "config.yaml")
    facts = {"num_identities": 3, "behaviours": ["running", "falling"], "identities": ["an", "bình", "chi"]}
    (run / "data.json").write_text(json.dumps(facts))
    run_ranks(1, save)
    return run


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: a second thread spins more than it works
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> VisionModel:
    return make_model("resnet10t", seed=0)


@pytest.fixture(scope="module")
def run(model: VisionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "faces"
    return save_run(folder, {7: {"model": model.state_dict()}}, "resnet10t", ema_decay=None)


def make_image(seed: int, height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    """Return a smooth image: what JPEG and another resizer change in it is small."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@torch.no_grad()
def embed(model: VisionModel, image: Image.Image) -> torch.Tensor:
    return model.embed(as_tensor(image)[None])


def docs_lines() -> str:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    (block,) = [block for block in blocks if "timm" in block]
    return str(block)


def test_the_docs_load_the_model_in_five_lines() -> None:
    lines = [line for line in docs_lines().splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) == 5 and "hpctrain" not in docs_lines()


@pytest.mark.parametrize("backbone", ["resnet10t", "vit_tiny_patch16_224"])
def test_the_lines_of_the_docs_give_our_embeddings_and_behaviours(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(backbone, seed=1)
    run = save_run(tmp_path / "run", {3: {"model": model.state_dict()}}, backbone, ema_decay=None)
    export_model(run, tmp_path / "face")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with torch.no_grad():
        exec(docs_lines(), names)
        found = names["embed"](make_image(0))
        behaviours = F.linear(found, names["heads"]["behaviour.weight"], names["heads"]["behaviour.bias"])
        expected = embed(model, make_image(0))
        assert model.behaviour_head is not None
        # fp32: the folded matrix sums in another order.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(behaviours, model.behaviour_head.logits(expected), rtol=1e-4, atol=1e-4)
        larger = names["embed"](make_image(0, 3 * HEIGHT, 2 * WIDTH))
        # The same picture, larger and of another shape: resized whole, by Pillow.
        assert F.cosine_similarity(larger, expected).item() > 0.999


def test_backbone_keys_are_those_of_timm(run: Path, model: VisionModel, tmp_path: Path) -> None:
    report = export_model(run, tmp_path / "face")
    assert (report.step, report.uses_ema) == (7, False)
    backbone = timm.create_model("resnet10t", num_classes=0)
    backbone.load_state_dict(load_file(tmp_path / "face" / "backbone.safetensors"), strict=True)
    assert all(torch.equal(v, model.backbone.state_dict()[k]) for k, v in backbone.state_dict().items())


def test_config_says_all_that_preprocessing_and_the_heads_need(run: Path, tmp_path: Path) -> None:
    export_model(run, tmp_path / "face")
    config = json.loads((tmp_path / "face" / "config.json").read_text())
    heads = load_file(tmp_path / "face" / "heads.safetensors")
    assert config["identities"] == ["an", "bình", "chi"] and config["behaviours"] == ["running", "falling"]
    assert {k: tuple(v.shape) for k, v in heads.items()} == {
        "embedding.weight": (config["embedding_dim"], 512),
        "embedding.bias": (config["embedding_dim"],),
        "identity.weight": (3, config["embedding_dim"]),
        "behaviour.weight": (2, config["embedding_dim"]),
        "behaviour.bias": (2,),
    }
    published = timm.get_pretrained_cfg("resnet10t")
    assert published is not None
    assert tuple(config["pretrained_cfg"]["mean"]) == published.mean
    assert config["pretrained_cfg"]["input_size"] == [3, HEIGHT, WIDTH]


def test_averaged_weights_are_taken_where_the_run_has_them(tmp_path: Path) -> None:
    last, averaged = make_model("resnet10t", 2), make_model("resnet10t", 3)
    ema = {name: value.detach() for name, value in averaged.named_parameters()}  # buffers stay the model's
    state = {"model": last.state_dict(), "ema": ema}
    run = save_run(tmp_path / "run", {3: state}, "resnet10t", ema_decay=0.9)
    for choice, source in ((None, averaged), (True, averaged), (False, last)):
        out = tmp_path / f"face_{choice}"
        assert export_model(run, out, choice).uses_ema == (source is averaged)
        weights = load_file(out / "backbone.safetensors")
        assert torch.equal(weights["conv1.0.weight"], source.backbone.state_dict()["conv1.0.weight"])
        assert torch.equal(weights["bn1.running_mean"], last.backbone.state_dict()["bn1.running_mean"])


def test_averaged_weights_that_the_run_lacks_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.ema_decay=null"):
        export_model(run, tmp_path / "face", ema=True)


def test_the_newest_sound_checkpoint_is_taken(
    model: VisionModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {step: {"model": model.state_dict()} for step in (5, 6)}
    run = save_run(tmp_path / "run", states, "resnet10t", ema_decay=None)
    assert export_model(run, tmp_path / "first").step == 6
    newest = store.latest(run / "checkpoints")
    assert newest is not None
    data = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert export_model(run, tmp_path / "second").step == 5
    assert f"passing over {newest.name}" in capsys.readouterr().err


def test_a_run_without_checkpoint_is_said_to_have_none(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", {}, "resnet10t", ema_decay=None)
    with pytest.raises(CheckpointError, match="no sound checkpoint"):
        export_model(run, tmp_path / "face")
    assert not (tmp_path / "face").exists()


def test_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "face").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export_model(run, tmp_path / "face")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in folders of different depth and formats, a damaged one, and something else."""
    root = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(["an/1.jpg", "an/2.JPG", "bình/1.png", "chi/1.jpg", "chi/2.jpg"]):
        (root / name).parent.mkdir(exist_ok=True)
        make_image(number, 100, 80).save(root / name, quality=95)
    (root / "chi" / "2.jpg").write_bytes((root / "chi" / "2.jpg").read_bytes()[:700])
    (root / "chi" / "notes.txt").write_text("not an image")
    return root


def read_embeddings(path: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(path)
    assert str(table.schema.field("embedding").type) == "list<element: float>"
    return {row["path"]: np.array(row["embedding"], np.float32) for row in table.to_pylist()}


def test_embeddings_of_a_folder_are_those_of_its_images(
    run: Path, model: VisionModel, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.export.embeddings._BATCH_SIZE", 2)
    report = export_embeddings(run, photos, tmp_path / "out.parquet")
    found = read_embeddings(tmp_path / "out.parquet")
    assert list(found) == ["an/1.jpg", "an/2.JPG", "bình/1.png", "chi/1.jpg"]
    assert report.num_images == 4 and [path for path, _ in report.damaged] == ["chi/2.jpg"]
    for path, embedding in found.items():
        image = Image.open(photos / path).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
        expected = F.normalize(embed(model, image))[0].numpy()
        assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)
        # Pillow resizes here, torchvision there, and the PNG went through a JPEG of quality 90.
        assert float(embedding @ expected) > 0.99
    different = [float(found["an/1.jpg"] @ other) for path, other in found.items() if path != "an/1.jpg"]
    assert max(different) < 0.9


def test_a_packed_split_gives_the_same_embeddings_as_its_folder(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    pack_images(photos, tmp_path / "packed", val_fraction=0.4, show=False)
    export_embeddings(run, photos, tmp_path / "folder.parquet")
    folder = read_embeddings(tmp_path / "folder.parquet")
    packed = {}
    for split in ("train", "val"):
        export_embeddings(run, tmp_path / "packed" / split, tmp_path / f"{split}.parquet")
        packed |= read_embeddings(tmp_path / f"{split}.parquet")
    assert packed.keys() == folder.keys()
    for path, embedding in packed.items():
        np.testing.assert_allclose(embedding, folder[path], atol=1e-5)  # other batches, other sums


def test_a_folder_without_images_is_refused_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no image to embed"):
        export_embeddings(run, tmp_path / "empty", tmp_path / "out.parquet")
    with pytest.raises(DataError, match="no folder"):
        export_embeddings(run, tmp_path / "none", tmp_path / "out.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_the_verbs_print_facts_as_json(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", str(run), str(tmp_path / "face"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 7
    assert main(["embeddings", str(run), str(photos), str(tmp_path / "out.parquet"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_images"], len(facts["damaged"])) == (4, 1)


def test_the_verbs_say_in_words_what_they_wrote(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embeddings", str(run), str(photos), str(tmp_path / "out.parquet")]) == 0
    said = capsys.readouterr()
    assert "4 images; 1 damaged ones left out" in said.out and "chi/2.jpg: " in said.err
