"""Find a Hugging Face model, in a directory or on the hub, and open its weights.

`owner/name` and `owner/name@revision` work wherever a directory does. Files are fetched once, into
`huggingface_hub`'s cache; `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_HOME` and tokens have their usual
meaning.

safetensors contain only tensors. Pickled files are read only with `allow_pickle`, by torch's
restricted unpickler, which builds only tensors and plain containers. torch and safetensors are
imported when a file is read.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import ConfigError, UserError, first_line, shown
from zero_tp.base.files import open_regular
from zero_tp.base.strict_json import InvalidJson, parse_object, read_object

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
ADAPTER = "adapter_config.json"
ID_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "tekken.json", "spiece.model", "sentencepiece.bpe.model"),
)
"""The files that decide a tokenizer's ids. It has at least one of the first two."""
TOKENIZER_FILES = (*ID_FILES, "chat_template.jinja", "chat_template.json")

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?")
_LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
TEXT_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
SAFETENSORS_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
PICKLED_PATTERNS = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Patterns of the texts and weights that are fetched from the hub."""


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory contains a tokenizer."""
    return any(os.path.isfile(directory / name) for name in TOKENIZER_FILES[:2])


def is_hub_name(model: str | Path) -> bool:
    """Return whether `model` is a name on the hub: neither the path nor its parent directory
    exists.
    """
    text = str(model)
    parent = Path(text.partition("@")[0]).parent
    return not os.path.lexists(text) and bool(HUB_NAME.fullmatch(text)) and not parent.exists()


def resolve(
    model: str | Path,
    key: str = "",
    *,
    weights: bool = True,
    allow_pickle: bool = False,
    **hub: Any,
) -> Path:
    """Return `model` as a directory; a name on the hub is fetched into the cache first.

    Ranks of one machine may call it at the same time: the cache locks, and each file is fetched
    once.

    Args:
        key: prefix of error messages; by default `model`.
        weights: fetch weights too, not only config and tokenizer.
        allow_pickle: also fetch pickled weights.
        hub: arguments of `snapshot_download`: token, cache_dir, local_files_only, force_download.
    """
    if not is_hub_name(model):
        return Path(model)
    name, _, revision = str(model).partition("@")
    patterns = [
        *TEXT_PATTERNS,
        *(SAFETENSORS_PATTERNS if weights else ()),
        *(PICKLED_PATTERNS if weights and allow_pickle else ()),
    ]
    from huggingface_hub import snapshot_download

    try:
        # Files of subdirectories, and Mistral's consolidated ones, are other formats of the same
        # model.
        ignored = ["*/*", "consolidated*"]
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                **hub,
            )
        )
    except Exception as error:  # huggingface_hub's own, its HTTP client's, or the system's
        option = f" --revision {revision}" if revision else ""
        # huggingface_hub's messages are long, and the names of its errors suffice.
        from_hub = type(error).__module__.startswith("huggingface_hub")
        reason = type(error).__name__ if from_hub else first_line(error)
        problem = (
            f"no directory {model}, and it could not be fetched from the Hugging Face hub "
            f"({reason})"
        )
        fetch = f"hf download {name}{option} --exclude '*/*' --local-dir DIR"
        remedy = (
            f"give a Hugging Face model directory; where there is a network, `{fetch}` makes one"
        )
        raise ConfigError(key or str(model), problem, remedy) from error


def is_cached(name: str, *, weights: bool) -> bool:
    """Return whether the cache has a hub model's weights, or else its tokenizer. Does not use
    the network.
    """
    try:
        # A directory exists once any file was fetched.
        directory = resolve(name, weights=weights, local_files_only=True)
    except ConfigError:
        return False
    if not weights:
        return has_tokenizer(directory)
    try:
        path = find_weights(directory, allow_pickle=True)
        return path.name in (SINGLE, PICKLED) or all(
            is_regular(directory / shard) for shard in _weight_map(path).values()
        )
    except UserError:  # `find_weights` refuses weights that are here by name, too
        return any((directory / file).exists() for file in (ADAPTER, SINGLE, PICKLED))


def has_commit(model: str) -> bool:
    """Return whether this is a hub name with a commit, the form that a run records."""
    return is_hub_name(model) and bool(COMMIT_HASH.fullmatch(model.partition("@")[2]))


def resolve_tokenizer(
    requested: Path | None, recorded: str | None, moved: Path | None = None
) -> Path | None:
    """Return the directory of the requested tokenizer, else of the one that the run recorded, else
    None.

    Args:
        moved: where the recorded one is if it was moved together with the run.
    """
    if requested is not None:
        directory = resolve(requested, "--tokenizer", weights=False)
        if not directory.is_dir():
            raise UserError(f"--tokenizer: no directory {directory}")
        if not has_tokenizer(directory):
            raise UserError(
                f"--tokenizer: {directory} holds no tokenizer: none of "
                f"{', '.join(TOKENIZER_FILES[:2])}"
            )
        return directory
    if recorded is None:
        return None
    if has_commit(recorded):
        return resolve(recorded, f"the run's tokenizer {recorded}", weights=False)
    if not Path(recorded).is_dir() and moved is not None and moved.is_dir():
        return moved
    if not Path(recorded).is_dir():
        raise UserError(
            f"the run's tokenizer {recorded} no longer exists; give its new path with --tokenizer "
            "DIR"
        )
    return Path(recorded)


def pin_to_first_start(model: Any, recorded: Any) -> Any:
    """Return `recorded`, a run's `name@commit`, if `model` is the same name without a revision;
    otherwise `model`.
    """
    both_text = isinstance(model, str) and isinstance(recorded, str)
    return (
        recorded if both_text and is_hub_name(model) and recorded.startswith(f"{model}@") else model
    )


def pin_commit(model: str, key: str) -> str:
    """Append the current commit to a hub name. Directories and names with a commit stay
    unchanged.
    """
    if not is_hub_name(model) or has_commit(model):
        return model
    commit = resolve(model, key, weights=False).name  # a snapshot's directory is named by it
    return f"{model.partition('@')[0]}@{commit}"


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of the safetensors file `path`, or of the first one of the index `path`.

    Empty if the file has none, or is no safetensors file (`open_weights` reports that).
    """
    if path.name == INDEX:
        path = path.parent / min(_weight_map(path).values())
    try:
        with open_regular(path) as file:
            # A safetensors file begins with its header's length, 8 bytes, and the header, JSON.
            size = int.from_bytes(file.read(8), "little")
            header = parse_object(file.read(size)) if size <= _LARGEST_HEADER else {}
    except (OSError, InvalidJson):
        return {}
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict):
        return {}
    return {name: value for name, value in metadata.items() if isinstance(value, str)}


def find_weights(directory: Path, allow_pickle: bool = False) -> Path:
    """Return the directory's weights file or index."""
    if (directory / ADAPTER).exists():
        raise UserError(
            f"{directory}: {ADAPTER} makes it an adapter of another model; merge the two, and give "
            "the whole model"
        )
    # Pickles last: a directory may have both kinds, and only pickles can carry code.
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        present = [directory / name for name in (index, single) if is_regular(directory / name)]
        if not present:
            continue
        if single == PICKLED and not allow_pickle:
            raise UserError(
                f"{directory}: its weights are pickled ({present[0].name}), which can carry code; "
                "use a safetensors "
                "version of it, or --allow-pickle (in Python allow_pickle=True) to read it with "
                "torch's restricted "
                "unpickler"
            )
        if len(present) == 2 and single not in _weight_map(present[0]).values():
            raise UserError(
                f"{directory}: {single} and {index} are two models in one directory; remove one of "
                "them"
            )
        return present[0]
    raise UserError(
        f"{directory}: no weights in it: no {SINGLE} nor {INDEX}; give a Hugging Face directory of "
        "safetensors"
    )


def is_regular(path: Path) -> bool:
    """Return whether this is a regular file; False if nothing is there.

    Raises:
        UserError: a pipe, a directory or another kind of file is there.
    """
    try:
        if path.is_file() or not os.path.lexists(path):
            return path.is_file()
    except OSError as error:
        raise UserError(
            f"{path.parent}: {shown(path.name)} can't be read ({error.strerror})"
        ) from error
    raise UserError(f"{path}: not a regular file; put a copy of the file there")


def open_weights(directory: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Return the directory's tensors by name, memory-mapped: only the parts that are used are
    read.
    """
    path = find_weights(directory, allow_pickle)
    read = _safetensors if path.name in (SINGLE, INDEX) else _unpickled
    if path.name in (SINGLE, PICKLED):
        return read(path)
    weight_map = _weight_map(path)
    loaded: dict[str, dict[str, Tensor]] = {}
    for file in sorted(set(weight_map.values())):
        if not is_regular(path.parent / file):
            raise UserError(f"{path.parent / file}: missing, but {path.name} names it")
        loaded[file] = read(path.parent / file)
    for name, file in weight_map.items():
        if name not in loaded[file]:
            raise UserError(
                f"{path}: tensor {name} is not in {file}; give the index that was written with the "
                "files"
            )
    return {name: loaded[file][name] for name, file in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Return an index's map of tensor → file. Files must be in the index's own directory."""
    try:
        weight_map = read_object(index).get("weight_map")
    except (OSError, InvalidJson) as error:
        raise UserError(f"{index}: not an index with a weight_map ({error})") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: not an index with a weight_map")
    for name in weight_map.values():
        # An index comes with a download: a name such as `../file` could read another file of the
        # user.
        if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
            raise UserError(f"{index}: {shown(name)} is not the name of a file beside it")
    return weight_map


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:  # safetensors' own type derives from nothing narrower
        raise UserError(
            f"{path}: its weights can't be read: not a safetensors file ({first_line(error)})"
        ) from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    import torch

    try:
        mapped = zipfile.is_zipfile(path)  # the format before torch 1.6 can't be memory-mapped
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # zipfile's, pickle's, torch's: a broken file can raise anything
        raise UserError(
            f"{path}: torch's restricted unpickler refuses it ({first_line(error)})"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise UserError(f"{path}: not a dict of tensors by name")
    for name, tensor in loaded.items():
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
            or tensor.is_quantized
        ):
            raise UserError(f"{path}: not a dict of tensors by name: {name} cannot be a weight")
    return dict(loaded)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a floating tensor has neither NaN nor Inf. Allocates no tensor of its size."""
    import torch

    # NaN propagates into both extremes, and an infinity is one of them: two numbers tell.
    return not tensor.numel() or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
