"""Draw a seam: a corpus, a tokenizer's make, a model type and a way on which they meet.

One question: are the ids and the loss of a page what transformers computes with the tokenizer of
the corpus, or was the way refused. A page is refused exactly where the tokenizers that meet give it
other ids.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.support.checkpoints import drawn, write_checkpoint
from tests.support.corpora import write_jsonl
from tests.support.native import native_model, to_ours, to_theirs
from tests.support.settings import deepspeed_settings
from tests.support.tiny_configs import CAUSAL_TYPES, tiny_config, tiny_fields
from tests.support.tiny_models import speeches
from tests.support.tokenizers import MAKES, OTHER_SCRIPTS, VOCABULARY
from zero_tp.base.errors import UserError
from zero_tp.data import PrepareSettings, prepare
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.directory import read_manifest
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.parent import check_parent
from zero_tp.run.config import RunConfig
from zero_tp.run.run_inputs import RunInputs
from zero_tp.tools.evaluation.model_directory import open_directory

PAGES = [f"{text} {OTHER_SCRIPTS}" for text in speeches(6, 160)]
LENGTH = 48
Page = tuple[list[int], float]
"""A page's ids and the model's loss on the first of them."""


def _same(tokenizer: PreTrainedTokenizerFast) -> None:
    """Change what makes no ids."""
    tokenizer.chat_template, tokenizer.padding_side = "{{ messages }}", "left"
    tokenizer.backend_tokenizer.enable_truncation(5)


def _other_numbers(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    words = [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Split("e", "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, *filter(None, [backend.pre_tokenizer])]
    )


def _lower_case(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), *filter(None, [backend.normalizer])]
    )


VARIANTS: dict[str, Callable[[PreTrainedTokenizerFast], None]] = {
    "same": _same,
    "words": _other_numbers,
    "lower": _lower_case,
}


@dataclass(frozen=True)
class Seam:
    """A drawn case.

    Attributes:
        make: of the tokenizer of the corpus.
        other: of the tokenizer that it meets: another make, or a variant of the same one.
        way: a key of `WAYS`.
    """

    make: str
    other: str
    model_type: str
    way: str
    page: str
    seed: int

    @classmethod
    def draw(cls, seed: int) -> Seam:
        """The ways come in turn, so few seeds have all of them."""
        chance, ways = random.Random(seed), list(WAYS)
        make = chance.choice(list(MAKES))
        other = chance.choice([*VARIANTS, chance.choice([name for name in MAKES if name != make])])
        return cls(
            make,
            other,
            chance.choice(CAUSAL_TYPES),
            ways[seed % len(ways)],
            chance.choice(PAGES),
            seed,
        )


class Workplace:
    """The corpora, the run and the reference of a seam, in a folder."""

    def __init__(self, folder: Path, seam: Seam) -> None:
        self.folder, self.seam = folder, seam
        self.met_in: Path | None = None
        self.corpus = self._prepare("corpus", self._tokenizer(seam.make))
        self.config = tiny_config(seam.model_type, VOCABULARY)

    def _tokenizer(self, name: str, variant: str | None = None) -> Path:
        directory = self.folder / "tokenizers" / f"{name}-{variant}"
        tokenizer = MAKES[name]()
        VARIANTS.get(variant or "", lambda tokenizer: None)(tokenizer)
        tokenizer.save_pretrained(str(directory))
        return directory

    def _prepare(self, name: str, tokenizer: Path) -> Path:
        source = write_jsonl(self.folder / f"{name}.jsonl", PAGES)
        return prepare(
            [source],
            self.folder / "data" / name,
            PrepareSettings(str(tokenizer), 1),
            progress=False,
        ).output

    @cached_property
    def other(self) -> Path:
        """The directory of the tokenizer that is met."""
        seam = self.seam
        return (
            self._tokenizer(seam.make, seam.other)
            if seam.other in VARIANTS
            else self._tokenizer(seam.other)
        )

    @cached_property
    def other_corpus(self) -> Path:
        return self._prepare("other", self.other)

    def inputs(self, **data: Any) -> RunInputs:
        """The inputs of a run on the corpus; `data` has other entries of the block, and
        `tokenizer`.
        """
        tokenizer = data.pop("tokenizer", None)
        data = {"train": str(self.corpus / "train"), "sequence_length": LENGTH, **data}
        model = tiny_fields(self.seam.model_type, VOCABULARY)
        block: dict[str, Any] = {"model": model, "data": data, "training": {"steps": 1}}
        block |= {} if tokenizer is None else {"tokenizer": str(tokenizer)}
        path = self.folder / f"{len(list(self.folder.glob('*.json')))}.json"
        path.write_text(json.dumps(deepspeed_settings(0, zero_tp=block)))
        return RunInputs(RunConfig.load(path, world_size=1), self.folder / "new")

    @cached_property
    def run(self) -> Path:
        """A run on the corpus with a checkpoint."""
        inputs = self.inputs()
        assert inputs.tokenizer is not None and not inputs.notes
        recorded: Any = {"tokenizer": inputs.tokenizer, "fingerprint": inputs.fingerprint}
        write_checkpoint(self.folder / "run", self.config, **recorded)
        return self.folder / "run"

    def weights(self, name: str, shape: Any) -> torch.Tensor:
        return drawn(name, "master", shape)

    @cached_property
    def reference(self) -> Page:
        """By the tokenizer as it was made, and transformers' model."""
        model = native_model(self.config)
        shapes = {
            name: tensor.shape for name, tensor in to_ours(self.config, model.state_dict()).items()
        }
        theirs = to_theirs(
            self.config, {name: self.weights(name, shape) for name, shape in shapes.items()}
        )
        model.load_state_dict(theirs, strict=False)
        return page(MAKES[self.seam.make](), model, self.seam.page)

    def same_ids(self) -> bool:
        """Whether the other tokenizer gives all pages the ids of the corpus, where it is met.

        In a model's directory transformers may take the class of the model_type, with other ids.
        """
        ours: Any = MAKES[self.seam.make]()
        theirs: Any = AutoTokenizer.from_pretrained(str(self.met_in or self.other))
        return all(
            ours.encode(text, verbose=False) == theirs.encode(text, verbose=False) for text in PAGES
        )


def page(tokenizer: Any, model: Any, text: str) -> Page:
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    first = torch.tensor([ids[:LENGTH]])
    with torch.no_grad():
        return ids, float(model(input_ids=first, labels=first).loss)


def opened_page(workplace: Workplace, model: Path, tokenizer: Path | None = None) -> Page:
    """The page as evaluate and sample see it."""
    directory = open_directory(model, tokenizer=tokenizer)
    return page(
        directory.tokenizer,
        directory.load_module(torch.float32, "cpu", Topology()),
        workplace.seam.page,
    )


def exported_page(workplace: Workplace, directory: Path) -> Page:
    """The page as transformers sees an export."""
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    return page(
        tokenizer, AutoModelForCausalLM.from_pretrained(str(directory)), workplace.seam.page
    )


@contextmanager
def working_directory(directory: Path) -> Iterator[None]:
    before = os.getcwd()
    directory.mkdir(parents=True, exist_ok=True)
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def _run(work: Workplace) -> Page:
    return opened_page(work, work.run)


def _export(work: Workplace) -> Page:
    to_huggingface(work.run, work.folder / "export")
    assert opened_page(work, work.folder / "export") == exported_page(work, work.folder / "export")
    return exported_page(work, work.folder / "export")


def _export_after_replacement(work: Workplace) -> Page:
    _ = work.run
    replace(work.corpus / "tokenizer", work.other)
    return _export(work)


def _replaced(work: Workplace) -> Page:
    _ = work.run
    replace(work.corpus / "tokenizer", work.other)
    return opened_page(work, work.run)


def _replaced_in_export(work: Workplace) -> Page:
    to_huggingface(work.run, work.folder / "export")
    replace(work.folder / "export", work.other)
    work.met_in = work.folder / "export"
    return opened_page(work, work.folder / "export")


def _tokenizer_words(work: Workplace) -> Page:
    return opened_page(work, work.run, work.other)


def _elsewhere(work: Workplace) -> Page:
    """A relative path, and another tokenizer at the same path of another working directory."""
    with working_directory(work.folder):
        work.corpus = work.corpus.relative_to(work.folder)
        run = work.run.absolute()
    replace(work.folder / "elsewhere" / work.corpus / "tokenizer", work.other)
    with working_directory(work.folder / "elsewhere"):
        return opened_page(work, run)


def _moved(work: Workplace) -> Page:
    """The run and its data move together."""
    assert work.run.exists()
    place = work.folder / "moved"
    place.mkdir()
    for name in ("run", "data"):
        shutil.move(work.folder / name, place / name)
    return opened_page(work, place / "run")


def _parent(work: Workplace) -> Page:
    new = work.inputs(train=str(work.other_corpus / "train"))
    parent = find_checkpoint(work.run / "checkpoints" / "step_00000001")
    try:
        check_parent(parent, new.config, new.model_config, new.fingerprint)
    except UserError as error:
        if "saved by a Trainer" not in str(error):  # the check after that of the tokenizers
            raise
    return _run(work)


def _resume(work: Workplace) -> Page:
    manifest = read_manifest(work.run / "checkpoints" / "step_00000001")
    new = work.inputs(tokenizer=work.other)
    new.check_resumed(work.run, manifest)
    return _run(work)


def _blend(work: Workplace) -> Page:
    prefixes = [str(corpus / "train") for corpus in (work.corpus, work.other_corpus)]
    assert not work.inputs(train=dict.fromkeys(prefixes, 1.0)).notes
    return _run(work)


def _validation(work: Workplace) -> Page:
    work.inputs(validation=str(work.other_corpus / "validation"))
    return _run(work)


def _named(work: Workplace) -> Page:
    work.inputs(tokenizer=work.other)
    return _run(work)


def replace(directory: Path, tokenizer: Path) -> None:
    """Put another tokenizer's files into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, directory / file.name)


WAYS: dict[str, tuple[Callable[[Workplace], Page], bool]] = {
    "run": (_run, False),
    "export": (_export, False),
    "export after the tokenizer was replaced": (_export_after_replacement, True),
    "run after the tokenizer was replaced": (_replaced, True),
    "export whose tokenizer was replaced": (_replaced_in_export, True),
    "--tokenizer": (_tokenizer_words, True),
    "another working directory": (_elsewhere, False),
    "a moved run": (_moved, False),
    "--from": (_parent, True),
    "resume": (_resume, True),
    "blend": (_blend, True),
    "validation": (_validation, True),
    "zero_tp.tokenizer": (_named, True),
}
"""By name: the way, and whether the other tokenizer is met on it."""


def check_seam(folder: Path, seam: Seam) -> bool:
    """Take the way; return whether it was refused."""
    work = Workplace(folder, seam)
    way, meets_other = WAYS[seam.way]
    expected = work.reference
    try:
        ids, loss = way(work)
    except UserError as error:
        assert meets_other and not work.same_ids(), f"{seam}: {error}"
        # One or two, or none.
        shows_texts = str(error).count(" tokens (") in (2, 4) or "differ, though" in str(error)
        assert shows_texts and "\n" not in str(error), error
        return True
    assert not meets_other or work.same_ids(), f"{seam}: not refused"
    assert ids == expected[0], seam
    assert abs(loss - expected[1]) <= 1e-4 * abs(expected[1]), (seam, loss, expected[1])
    return False
