"""Prompts to train and evaluate on: from a file or a reasoning-gym data set, in an order that can be resumed.

Life of a prompt:
  1. `make_task` reads all records, renders them (`prompts`), drops those longer than the limit, and counts
     them. A bad record is an error that names file and line; nothing is cut or skipped quietly.
  2. `Task.train_iterator` draws batches without end: every epoch is a new permutation of all prompts, fixed by
     the seed. Its state is a small JSON object; set again, the next batch is the one that would have come.
  3. Every process draws the same global order and keeps its share of each batch, so the state does not depend
     on the number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tlt_jax.rl import answers, gym, prompts

SOURCES = ("jsonl", "parquet", "reasoning_gym")
_EVAL_SEED_OFFSET = 1_000_003  # reasoning-gym: the held-out prompts come from another seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Where prompts come from and how they are put to the model.

    Attributes:
      source: "jsonl", "parquet" or "reasoning_gym".
      path: training file (jsonl, parquet).
      eval_path: held-out file; "" holds out the last `eval_size` records of `path`.
      prompt_field: field of the question.
      messages_field: field of a ready list of chat messages, instead of `prompt_field`; "" for none.
      answer_field: field of the right answer; "" where the reward needs none.
      answer_source: how the right answer stands in its field, one of `answers.ANSWER_FORMATS`:
        "text" is the whole field, "hash" what follows "####", "boxed" the last box.
      answer_format: how the model is to state its answer, of the same names.
      extra_fields: further fields to hand to the reward, under `reference["record"]`.
      dataset: reasoning-gym data set.
      params: its parameters, such as difficulty.
      size: most training records; 0 takes all of a file. reasoning-gym needs a number.
      eval_size: held-out prompts; 0 for none (of `eval_path`, all).
      seed: of reasoning-gym's generator.
      max_prompt_tokens: longer prompts are dropped and counted.
      system_prompt: system message; "" for none.
      prompt_template: text around the question, which replaces `{prompt}`.
      few_shot: (question, answer) pairs shown before the question.
    """

    source: str = "jsonl"
    path: str = ""
    eval_path: str = ""
    prompt_field: str = "prompt"
    messages_field: str = ""
    answer_field: str = "answer"
    answer_source: str = "text"
    answer_format: str = "boxed"
    extra_fields: Sequence[str] = ()
    dataset: str = ""
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 0
    eval_size: int = 0
    seed: int = 0
    max_prompt_tokens: int = 1024
    system_prompt: str = ""
    prompt_template: str = "{prompt}"
    few_shot: Sequence[tuple[str, str]] = ()

    def __post_init__(self):
        formats = sorted(answers.ANSWER_FORMATS)
        is_gym = self.source == "reasoning_gym"
        checks = (
            ("source", self.source in SOURCES, f"one of {SOURCES}"),
            ("path", is_gym or bool(self.path), f"a file for source {self.source!r}"),
            ("dataset", not is_gym or bool(self.dataset), "a reasoning-gym data set, e.g. 'chain_sum'"),
            ("size", self.size >= 0, ">= 0 (0 takes all of a file)"),
            ("size", not is_gym or self.size > 0, "> 0: reasoning-gym makes as many as asked for"),
            ("eval_size", self.eval_size >= 0, ">= 0"),
            ("answer_source", self.answer_source in formats, f"one of {formats}"),
            ("answer_format", self.answer_format in formats, f"one of {formats}"),
            ("max_prompt_tokens", self.max_prompt_tokens >= 1, ">= 1"),
            ("prompt_template", "{prompt}" in self.prompt_template, "text with '{prompt}' in it"),
            ("few_shot", all(len(pair) == 2 for pair in self.few_shot), "(question, answer) pairs"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"task.{name}: got {getattr(self, name)!r}, expected {expected}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question as the model sees it, and what its reward needs to know."""

    prompt_id: int  # place in its set, before any were dropped
    token_ids: tuple[int, ...]
    text: str
    reference: Mapping[str, Any]  # plain JSON values


def make_task(config: TaskConfig, tokenizer) -> Task:
    """Reads and renders all prompts of a task.

    Raises:
      ValueError: a bad record, with file and line; no prompt left; an unknown data set or parameter.
    """
    if config.source == "reasoning_gym":
        train, held_out = _gym_records(config)
    else:
        train = list(_file_records(config, config.path))
        if config.eval_path:
            held_out = list(_file_records(config, config.eval_path))[: config.eval_size or None]
        else:
            cut = len(train) - config.eval_size
            train, held_out = train[: max(cut, 0)], train[max(cut, 0) :]
        train = train[: config.size or None]
    builder = _PromptBuilder(config, tokenizer)
    train_prompts, eval_prompts = builder.build(train), builder.build(held_out)
    if not train_prompts:
        raise ValueError(
            f"task: no training prompt left of {len(train)} ({builder.num_dropped} longer than "
            f"max_prompt_tokens={config.max_prompt_tokens}); expected at least 1, raise the limit or add records"
        )
    return Task(train_prompts, eval_prompts, builder.num_dropped)


Located = tuple[str, dict[str, Any]]  # where a record stands, for error messages, and the record


def _gym_records(config: TaskConfig) -> tuple[list[Located], list[Located]]:
    params = json.dumps(dict(config.params), sort_keys=True)
    sets = ((config.size, config.seed), (config.eval_size, config.seed + _EVAL_SEED_OFFSET))
    listed = gym.make_records([(config.dataset, size, seed, params) for size, seed in sets])
    located = []
    for (size, seed), records in zip(sets, listed, strict=True):
        spec = {"dataset": config.dataset, "size": size, "seed": seed, "params": dict(config.params)}
        located.append(
            [
                (f"{config.dataset}[{index}]", {**record, "reasoning_gym": {**spec, "index": index}})
                for index, record in enumerate(records)
            ]
        )
    train, held_out = located
    questions = {record["question"] for _, record in held_out}
    return [item for item in train if item[1]["question"] not in questions], held_out


def _file_records(config: TaskConfig, path: str) -> Iterator[Located]:
    if not pathlib.Path(path).is_file():
        raise ValueError(f"task: no file {path!r}; expected a {config.source} file")
    if config.source == "parquet":
        import pyarrow.parquet

        for row, record in enumerate(pyarrow.parquet.read_table(path).to_pylist()):
            yield f"{path}: row {row}", record
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise ValueError(f"{path}:{number}: not a JSON object ({error}); fix or remove the line") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: got {line.strip()[:60].decode()!r}, expected a JSON object")
            yield f"{path}:{number}", record


class _PromptBuilder:
    """Turns located records into prompts and counts those it drops."""

    def __init__(self, config: TaskConfig, tokenizer):
        self._config = config
        self._tokenizer = tokenizer
        self.num_dropped = 0

    def build(self, records: Sequence[Located]) -> list[Prompt]:
        built = []
        for index, (where, record) in enumerate(records):
            messages = self._messages(where, record)
            try:
                text = prompts.render(messages, self._tokenizer)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            token_ids = prompts.encode(text, self._tokenizer)
            if len(token_ids) > self._config.max_prompt_tokens:
                self.num_dropped += 1
                continue
            reference = self._reference(where, record, text)
            built.append(Prompt(prompt_id=index, token_ids=token_ids, text=text, reference=reference))
        return built

    def _messages(self, where: str, record: dict[str, Any]) -> list[prompts.Message]:
        config = self._config
        if config.messages_field:
            try:
                return prompts.check_messages(_field(where, record, config.messages_field))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        name = "question" if config.source == "reasoning_gym" else config.prompt_field
        prompt = _field(where, record, name)
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"{where}: empty prompt: field {name!r} is {prompt!r:.40}; expected some text")
        return prompts.make_messages(
            prompt, system=config.system_prompt, template=config.prompt_template, few_shot=config.few_shot
        )

    def _reference(self, where: str, record: dict[str, Any], text: str) -> dict[str, Any]:
        config = self._config
        reference = {"format": config.answer_format, "opens_think": prompts.opens_think(text)}
        if config.source == "reasoning_gym":
            return {**reference, "answer": record["answer"], "reasoning_gym": record["reasoning_gym"]}
        if config.answer_field:
            value = _field(where, record, config.answer_field)
            stated = "" if value is None else str(value)
            reference["answer"] = answers.extract_answer(stated, config.answer_source)
            if reference["answer"] is None:
                raise ValueError(
                    f"{where}: no answer of kind {config.answer_source!r} in field {config.answer_field!r}: "
                    f"{stated[-60:]!r}; fix the record or task.answer_source"
                )
        if config.extra_fields:
            reference["record"] = {name: _field(where, record, name) for name in config.extra_fields}
        return reference


def _field(where: str, record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(f"{where}: no field {name!r}, expected it beside {sorted(record)}")
    return record[name]


class Task:
    """The prompts of a task, ready to draw."""

    def __init__(self, train: Sequence[Prompt], held_out: Sequence[Prompt], num_dropped: int):
        self.train = tuple(train)
        self.num_dropped_prompts = num_dropped  # longer than the limit, held-out ones included
        self._held_out = list(held_out)

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts, in file order."""
        return list(self._held_out)

    def train_iterator(
        self, batch_prompts: int, seed: int, *, process_index: int = 0, process_count: int = 1
    ) -> TrainIterator:
        """Endless batches of training prompts; see `TrainIterator`."""
        return TrainIterator(self.train, batch_prompts, seed, process_index, process_count)


class TrainIterator:
    """Shuffled epochs of prompts in batches of `batch_prompts`, with a saved position.

    A batch may span two epochs, so that every prompt is drawn equally often. With several processes each
    yields its contiguous share of the same global batch.
    """

    def __init__(self, train: Sequence[Prompt], batch_prompts: int, seed: int, process_index=0, process_count=1):
        if batch_prompts < 1:
            raise ValueError(f"batch_prompts: got {batch_prompts}, expected >= 1")
        if batch_prompts % process_count:
            raise ValueError(
                f"batch_prompts: got {batch_prompts} for {process_count} processes, expected a multiple of their count"
            )
        import grain  # slow import

        self._train = train
        share = batch_prompts // process_count
        self._share = slice(process_index * share, (process_index + 1) * share)
        order = (
            grain.MapDataset.range(len(train)).seed(seed).shuffle().repeat().batch(batch_prompts, drop_remainder=True)
        )
        self._indices = iter(order.to_iter_dataset(grain.ReadOptions(num_threads=0)))
        ids = np.array([prompt.prompt_id for prompt in train], np.int64)
        tokens = np.concatenate([np.array(prompt.token_ids, np.int64) for prompt in train])
        digest = hashlib.sha256(ids.tobytes() + tokens.tobytes()).hexdigest()[:16]
        self._identity = {"batch_prompts": batch_prompts, "seed": seed, "num_prompts": len(train), "digest": digest}

    def __iter__(self):
        return self

    def __next__(self) -> list[Prompt]:
        return [self._train[index] for index in next(self._indices)[self._share]]

    def get_state(self) -> dict[str, Any]:
        """JSON object from which `set_state` goes on, under any number of processes."""
        return {**self._identity, "position": self._indices.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          ValueError: the state belongs to other prompts, another seed or another batch size.
        """
        for name, ours in self._identity.items():
            if state.get(name) != ours:
                raise ValueError(
                    f"data position: saved with {name}={state.get(name)!r}, got {ours!r}; expected the same task, "
                    "seed and batch size as the saved run, or a new workdir"
                )
        self._indices.set_state(dict(state["position"]))
