"""What Hydra and OmegaConf complain about, in our form: what was asked, what is true, what to type."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from enum import Enum

from omegaconf.errors import OmegaConfBaseException

from hpctrain.config import schema
from hpctrain.errors import ConfigError

_WORDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a text"}
_LISTS = {
    "list[int]": "[64,56]",
    "list[float]": "[0.9,0.999]",
    "list[str]": "['a','b']",
    "list[list[int]]": "[[0,1],[2,3]]",
}


def explain(error: OmegaConfBaseException) -> ConfigError:
    """A value or key that does not fit the schema."""
    key = getattr(error, "full_key", None) or ""
    first_line = str(error).strip().splitlines()[0]
    missing = re.search(r"of type `(\w+)` has missing mandatory value: (\w+)", first_line)
    if missing:
        names = {kind.__name__: group for group, kinds in _groups().items() for kind in kinds}
        group = names.get(missing[1], "")
        key = f"{group}.{missing[2]}".lstrip(".")
        return ConfigError(f"{key} is not set", "it has no default", f"add {key}=VALUE")
    if key in known_keys():
        return ConfigError(f"bad value for {key}", first_line, expected(key))
    return ConfigError(f"no key {key}" if key else "bad config", first_line, nearest(key))


def explain_hydra(error: Exception) -> ConfigError:
    """A composition that failed: unknown option, unknown key, wrong type, wrong syntax."""
    text = str(error).strip()
    for pattern, say in _RULES.items():
        match = re.search(pattern, text)
        if match:
            return say(match, text, error)
    said = text.replace("\\'", "'").partition("See https")[0].split("\n")
    return ConfigError("the config cannot be composed", "; ".join(filter(None, said[:3])), "hpctrain --help")


def _unknown_option(match: re.Match[str], text: str, error: Exception) -> ConfigError:
    group, name = match[1], match[2]
    listed = (line.strip() for line in text.splitlines() if line.startswith("\t") and "provider=" not in line)
    options = [option for option in listed if not option.startswith("_")]
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.4) or options[:1]
    prefix = "+" if group == "exp" else ""
    return ConfigError(
        f"no {group} named {name!r}",
        f"known: {', '.join(options)}",
        f"{prefix}{group}={close[0]}" if close else "",
    )


def _unknown_key(match: re.Match[str], text: str, error: Exception) -> ConfigError:
    table, _, _ = match[1].rpartition(".")
    if table in known_keys() and "table" in expected(table):
        return ConfigError(f"no key {match[1]}", f"{table} is a table that you fill", f"+{match[1]}=VALUE")
    if match[1] in known_keys():
        return ConfigError(match[1], "a table is filled entry by entry", f"+{match[1]}.NAME=VALUE")
    return ConfigError(f"no key {match[1]}", "the config has no such key", nearest(match[1]))


def _wrong_type(match: re.Match[str], text: str, error: Exception) -> ConfigError:
    key = match[1].lstrip("+")
    cause = (str(error.__cause__ or "").strip() or text).splitlines()[0]
    change = expected(key) if key in known_keys() else nearest(key)
    return ConfigError(f"{match[1]}={match[2]}", cause, change)


def _several_values(match: re.Match[str], text: str, error: Exception) -> ConfigError:
    key, _, values = match[1].partition("=")
    return ConfigError(
        match[1],
        "one run takes one value",
        f"-m to sweep over them, {key}=[{values}] for a list, or \"{key}='{values}'\" for a text",
    )


def _wrong_syntax(match: re.Match[str], text: str, error: Exception) -> ConfigError:
    said = text.splitlines()[1] if "\n" in text else "it cannot be parsed"
    if "=" not in match[1]:
        said = "it has no ="
    return ConfigError(
        f"{match[1]!r} is no override",
        said,
        "write key=value, and +exp=NAME; quote values with spaces, commas or dashes in front: 'key=\"a, b\"'",
    )


def _given_twice(match: re.Match[str], text: str, error: Exception) -> ConfigError:
    if match[1] == "exp":
        return ConfigError("exp is given twice", "a run has one experiment", "give one +exp=NAME")
    return ConfigError(
        f"+{match[1]} would be a second {match[1]}",
        "there is one already",
        f"{match[1]}=NAME, without +, replaces it",
    )


def _bad_group(match: re.Match[str], text: str, error: Exception) -> ConfigError:
    return ConfigError(
        "a group is chosen by the name of one of its options", text, "GROUP=NAME, such as optim=adamw"
    )


_RULES: dict[str, Callable[[re.Match[str], str, Exception], ConfigError]] = {
    r"Could not find '([\w.-]+)/([^']+)'": _unknown_option,
    r"Could not override '([^']+)'": _unknown_key,
    r"Error merging override (\S+?)=(.*)": _wrong_type,
    r"Ambiguous value for argument '([^']+)'": _several_values,
    r"Error parsing override '([^']*)'": _wrong_syntax,
    r"LexerNoViableAltException: (.*)": _wrong_syntax,
    r"Multiple values for (\w+)": _given_twice,
    r"Config group override": _bad_group,
}


def _groups() -> dict[str, list[type]]:
    """Group name to its dataclasses: one, or one for each kind of model and data."""
    groups = {}
    for field in dataclasses.fields(schema.Config):
        if str(field.type).endswith("Config"):
            base = getattr(schema, str(field.type))
            groups[field.name] = base.__subclasses__() or [base]
    return groups


def _fields() -> dict[str, dataclasses.Field[object]]:
    """Every dotted key of the schema."""
    groups = _groups()
    found = {outer.name: outer for outer in dataclasses.fields(schema.Config) if outer.name not in groups}
    for group, classes in groups.items():
        for inner in (field for kind in classes for field in dataclasses.fields(kind)):
            nested = getattr(schema, str(inner.type), None)
            if dataclasses.is_dataclass(nested):
                found |= {f"{group}.{inner.name}.{f.name}": f for f in dataclasses.fields(nested)}
            else:
                found[f"{group}.{inner.name}"] = inner
    return found


def known_keys() -> list[str]:
    return list(_fields())


def expected(key: str) -> str:
    """What a known key takes, with an example."""
    field = _fields()[key]
    kind = str(field.type)
    plain = kind.removesuffix(" | None")
    enum = getattr(schema, plain, None)
    if plain in _LISTS:
        return f"a list, such as {key}={_LISTS[plain]}"
    if plain.startswith("dict"):
        return f"a table, such as +{key}.NAME=VALUE"
    if isinstance(enum, type) and issubclass(enum, Enum):
        return " or ".join(f"{key}={member.name}" for member in enum)
    words = _WORDS[plain] + (", or null" if plain != kind else "")
    example = "" if field.default in (None, "???") else f", such as {key}={field.default}"
    return words + example


def nearest(key: str) -> str:
    """A suggestion for a mistyped key: the same last word in another group, or nearest in spelling."""
    keys, wanted = known_keys(), key.lstrip("+~")
    same_word = [k for k in keys if k.rpartition(".")[2] == wanted.rpartition(".")[2]]
    group = wanted.partition(".")[0] + "."
    siblings = [k for k in keys if k.startswith(group)]
    near = (
        same_word
        or difflib.get_close_matches(wanted, siblings or keys, n=3, cutoff=0.75)
        or [f"keys there: {', '.join(k.removeprefix(group) for k in siblings)}"] * bool(siblings)
    )
    return " or ".join(near[:3]) if near else "hpctrain/config/schema.py lists all keys"
