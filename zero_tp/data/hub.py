"""Read data sets of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from zero_tp.base.errors import UserError, first_line
from zero_tp.data.compression import COMPRESSIONS, open_decompressed, piece_bytes
from zero_tp.data.formats import STREAMS, choose_columns, import_optional
from zero_tp.data.records import HUB, Problem, Record, Source


def read_hub(source: Source) -> Iterator[Record]:
    """Yield the rows of a data set of the Hugging Face hub, streamed.

    Files of JSON are read by our own reader. That of datasets decides the types of all fields by
    the first 10 MB, and ends where another field than the text has another type later.

    Raises:
        UserError: neither it nor a cache can be read.
    """
    name, config, split = [*source.name.removeprefix(HUB).split(":", 2), "", ""][:3]
    datasets, hub = (
        import_optional(module, source.name) for module in ("datasets", "huggingface_hub")
    )
    row = 0
    split = split or "train"
    try:
        try:
            builder = datasets.load_dataset_builder(name, config or None)
        except ConnectionError:  # a snapshot in the hub's cache is a directory
            directory = hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
            builder = datasets.load_dataset_builder(directory, config or None)
        files = _json_files(builder, split)
        rows = (
            _json_rows(source, files)
            if files
            else _streamed_rows(source, builder.as_streaming_dataset(split=split))
        )
        for row, content in enumerate(rows, start=1):
            yield Record(row, content)
    except (UserError, GeneratorExit):
        raise
    except (
        Exception
    ) as error:  # datasets and huggingface_hub raise a dozen types, with and without a network
        remedy = f"`hf download --repo-type dataset {name}`"
        if row:
            remedy = f"; download its files with {remedy}, and give them as --input"
        elif isinstance(error, ValueError | TypeError) and not isinstance(
            error, OSError
        ):  # not of the network
            remedy = ""
        else:
            remedy = (
                "; without a network it must be in this machine's cache (HF_HOME): download it "
                f"with {remedy}"
            )
        raise UserError(
            f"{source.name}: can't be read further than row {row:,}: {first_line(error)}{remedy}"
        ) from error


def _streamed_rows(source: Source, stream: Any) -> Iterator[dict[str, Any]]:
    # Some data sets declare no types: those of the first row are then taken for texts.
    features = stream.features or {key: None for key in next(iter(stream), {})}
    if not features:
        return
    types = {key: str(getattr(kind, "dtype", "string")) for key, kind in features.items()}
    fields = {
        key: None if kind in ("string", "large_string") else kind for key, kind in types.items()
    }
    yield from stream.select_columns(choose_columns(source, fields))


def _json_files(builder: Any, split: str) -> list[str]:
    """Return the paths or URLs of a split's files if all are JSON that our reader can read."""
    settings = builder.config
    # Ours reads only plain JSON in UTF-8; anything else goes through the library.
    if builder.name != "json" or settings.field is not None or settings.encoding != "utf-8":
        return []
    files = {str(key): list(paths) for key, paths in (settings.data_files or {}).items()}.get(
        split, []
    )
    return files if all(_compression_of(file) is not None for file in files) else []


def _compression_of(file: str) -> str | None:
    """Return the ending of a JSON file's compression, "" without one.

    None: it is another kind of file.
    """
    endings = PurePosixPath(file).suffixes[-2:]
    ending = endings.pop() if endings and endings[-1] in COMPRESSIONS else ""
    return ending if endings[-1:] in ([".jsonl"], [".json"]) else None


def _json_rows(source: Source, files: list[str]) -> Iterator[Any]:
    fsspec = import_optional("fsspec", source.name)
    for file in files:
        ending = _compression_of(file) or ""
        with fsspec.open(file, "rb") as raw:
            stored = iter(partial(raw.read, piece_bytes(ending)), b"")
            try:
                for record in STREAMS["json"](source, open_decompressed(file, ending, stored)):
                    yield record.content
            except EOFError as error:
                yield Problem(
                    "unreadable", f"not a whole {ending} file ({error}): the rest of {file} is lost"
                )
