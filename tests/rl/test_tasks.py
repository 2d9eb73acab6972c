"""Records to prompts, and the order in which they are drawn."""

import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import transformers

from tlt_jax.rl import prompts, tasks

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(chat_template=None):
    words = ["[UNK]", "[BOS]", *(str(n) for n in range(100)), "plus", "What", "is", "Think", "<", ">"]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast.post_processor = tokenizers.processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="[BOS]", unk_token="[UNK]")
    tokenizer.chat_template = chat_template
    return tokenizer


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def make_file(tmp_path, count=13):
    return write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"{n} plus 1", "answer": n + 1} for n in range(count)])


def make_task(tmp_path, count=13, **kwargs):
    return tasks.make_task(tasks.TaskConfig(path=make_file(tmp_path, count), **kwargs), make_tokenizer())


def draw(iterator, steps):
    return [[prompt.prompt_id for prompt in next(iterator)] for _ in range(steps)]


def test_every_epoch_is_another_permutation(tmp_path):
    iterator = make_task(tmp_path).train_iterator(1, seed=3)
    first, second = draw(iterator, 13), draw(iterator, 13)
    assert sorted(first) == sorted(second) == [[n] for n in range(13)]
    assert first != second
    assert draw(make_task(tmp_path).train_iterator(1, seed=4), 13) != first


def test_resumed_prompts_are_the_uninterrupted_ones(tmp_path):
    """C5, C7: 10 steps == 4 + resume + 6 == three segments, across epoch ends, from a state in JSON."""
    whole = draw(make_task(tmp_path).train_iterator(4, seed=1), 10)
    for segments in ((4, 6), (3, 4, 3)):
        state, drawn = None, []
        for steps in segments:
            iterator = make_task(tmp_path).train_iterator(4, seed=1)
            if state is not None:
                iterator.set_state(json.loads(state))
            drawn += draw(iterator, steps)
            state = json.dumps(iterator.get_state())
        assert drawn == whole


def test_global_order_is_independent_of_the_number_of_processes(tmp_path):
    """C8: a position saved by two processes goes on under one or four in the same global order."""
    task = make_task(tmp_path)
    whole = draw(task.train_iterator(4, seed=1), 6)
    pair = [task.train_iterator(4, seed=1, process_index=i, process_count=2) for i in range(2)]
    assert [a + b for a, b in zip(draw(pair[0], 2), draw(pair[1], 2))] == whole[:2]
    assert pair[0].get_state() == pair[1].get_state()
    for count in (1, 4):
        shares = []
        for index in range(count):
            iterator = task.train_iterator(4, seed=1, process_index=index, process_count=count)
            iterator.set_state(pair[0].get_state())
            shares.append(draw(iterator, 4))
        assert [list(itertools.chain(*parts)) for parts in zip(*shares)] == whole[2:]
    with pytest.raises(ValueError, match="4 for 3 processes"):
        task.train_iterator(4, seed=1, process_count=3)


def test_a_position_of_another_task_is_refused(tmp_path):
    state = make_task(tmp_path).train_iterator(4, seed=1).get_state()
    for iterator, name in (
        (make_task(tmp_path).train_iterator(2, seed=1), "batch_prompts=4, got 2"),
        (make_task(tmp_path).train_iterator(4, seed=2), "seed=1, got 2"),
        (make_task(tmp_path, count=12).train_iterator(4, seed=1), "num_prompts=13, got 12"),
        (make_task(tmp_path, prompt_template="Think {prompt}").train_iterator(4, seed=1), "digest="),
    ):
        with pytest.raises(ValueError, match=name):
            iterator.set_state(state)


def test_prompts_are_rendered_by_the_chat_template(tmp_path):
    config = tasks.TaskConfig(
        path=make_file(tmp_path),
        system_prompt="Think",
        prompt_template="What is {prompt} {x}",
        few_shot=(("5 plus 6", "11"),),
    )
    prompt = tasks.make_task(config, make_tokenizer(CHAT)).train[2]
    assert prompt.text == ("<system>Think<user>What is 5 plus 6 {x}<assistant>11<user>What is 2 plus 1 {x}<assistant>")
    assert 1 not in prompt.token_ids  # the template writes the special tokens, none is added
    assert prompt.reference == {"format": "boxed", "opens_think": False, "answer": "3"}


def test_plain_text_without_a_chat_template(tmp_path):
    prompt = make_task(tmp_path, system_prompt="Think").train[2]
    assert prompt.text == "Think\n\n2 plus 1"
    assert prompt.token_ids[0] == 1


def test_a_template_that_opens_thinking_is_noticed(tmp_path):
    """G10: the reward must know that the response starts inside thinking."""
    config = tasks.TaskConfig(path=make_file(tmp_path))
    task = tasks.make_task(config, make_tokenizer(CHAT + "<think>"))
    assert task.train[0].reference["opens_think"] is True


def test_messages_and_extra_fields(tmp_path):
    record = {"chat": [{"role": "user", "content": "2 plus 2"}], "level": 3}
    path = write_jsonl(tmp_path / "chat.jsonl", [record])
    config = tasks.TaskConfig(path=path, messages_field="chat", answer_field="", extra_fields=("level",))
    prompt = tasks.make_task(config, make_tokenizer(CHAT)).train[0]
    assert prompt.text == "<user>2 plus 2<assistant>"
    assert prompt.reference["record"] == {"level": 3}
    for broken, words in (
        ([], "non-empty list"),
        ([{"role": "me", "content": "x"}], "'me'"),
        ([{"role": "user"}], "content"),
    ):
        write_jsonl(tmp_path / "chat.jsonl", [record, {**record, "chat": broken}])
        with pytest.raises(ValueError, match=f"chat.jsonl:2: messages.*{words}"):
            tasks.make_task(config, make_tokenizer(CHAT))


def test_long_prompts_are_dropped_and_counted(tmp_path):
    path = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "1 " * n, "answer": "1"} for n in (2, 9, 3)])
    config = tasks.TaskConfig(path=path, max_prompt_tokens=5)
    task = tasks.make_task(config, make_tokenizer())
    assert [(p.prompt_id, len(p.token_ids)) for p in task.train] == [(0, 3), (2, 4)]
    assert task.num_dropped_prompts == 1
    with pytest.raises(ValueError, match=r"no training prompt left of 3 .3 longer than max_prompt_tokens=2"):
        tasks.make_task(tasks.TaskConfig(path=path, max_prompt_tokens=2), make_tokenizer())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "1", ', "not a JSON object"),
        ('["1"]', "expected a JSON object"),
        ('{"prompt": " ", "answer": "1"}', "empty prompt"),
        ('{"prompt": null, "answer": "1"}', "empty prompt"),
        ('{"question": "1", "answer": "1"}', "no field 'prompt'.*question"),
        ('{"prompt": "1"}', "no field 'answer'"),
        ('{"prompt": "1", "answer": null}', "no answer of kind 'text'"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path, line, words):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"bad.jsonl:3: .*{words}"):
        tasks.make_task(tasks.TaskConfig(path=str(tmp_path / "bad.jsonl")), make_tokenizer())


def test_answers_are_taken_from_worked_solutions(tmp_path):
    path = write_jsonl(tmp_path / "g.jsonl", [{"prompt": "1", "answer": "so 2\n#### 1,002"}])
    config = tasks.TaskConfig(path=path, answer_source="hash")
    assert tasks.make_task(config, make_tokenizer()).train[0].reference["answer"] == "1,002"
    write_jsonl(tmp_path / "g.jsonl", [{"prompt": "1", "answer": "so 2"}])
    with pytest.raises(ValueError, match=r"g.jsonl:1: no answer of kind 'hash'"):
        tasks.make_task(config, make_tokenizer())


def test_held_out_prompts_are_not_trained_on(tmp_path):
    task = make_task(tmp_path, eval_size=3, size=8)
    assert [p.text for p in task.eval_prompts()] == ["10 plus 1", "11 plus 1", "12 plus 1"]
    assert len(task.train) == 8
    other = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "99", "answer": "99"}] * 2)
    task = make_task(tmp_path, eval_path=other)
    assert (len(task.train), len(task.eval_prompts())) == (13, 2)


def test_parquet_equals_jsonl(tmp_path):
    records = [{"prompt": f"{n}", "answer": f"{n}"} for n in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    config = tasks.TaskConfig(source="parquet", path=str(tmp_path / "a.parquet"))
    lines = tasks.TaskConfig(path=write_jsonl(tmp_path / "a.jsonl", records))
    assert tasks.make_task(config, make_tokenizer()).train == tasks.make_task(lines, make_tokenizer()).train


def test_reasoning_gym_by_name_and_difficulty():
    config = tasks.TaskConfig(
        source="reasoning_gym", dataset="chain_sum", params={"max_terms": 2, "max_digits": 1}, size=30, eval_size=10
    )
    task = tasks.make_task(config, make_tokenizer())
    held_out = {prompt.text for prompt in task.eval_prompts()}
    assert len(task.eval_prompts()) == 10
    assert not held_out & {prompt.text for prompt in task.train}
    reference = json.loads(json.dumps(task.train[0].reference))
    assert reference == task.train[0].reference
    assert reference["reasoning_gym"]["dataset"] == "chain_sum"
    assert task.train[0].text.rstrip(" =").split()[-3] in "0123456789"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": "csv"}, "task.source: got 'csv', expected one of"),
        ({}, "task.path: got ''"),
        ({"source": "reasoning_gym", "size": 1}, "task.dataset"),
        ({"source": "reasoning_gym", "dataset": "gcd"}, "task.size: got 0"),
        ({"path": "x", "answer_format": "latex"}, "task.answer_format: got 'latex'.*last_number"),
        ({"path": "x", "prompt_template": "Q:"}, "task.prompt_template"),
        ({"path": "x", "max_prompt_tokens": 0}, "task.max_prompt_tokens"),
    ],
)
def test_bad_config(fields, words):
    with pytest.raises(ValueError, match=words):
        tasks.TaskConfig(**fields)


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match=r"no file 'nowhere.jsonl'"):
        tasks.make_task(tasks.TaskConfig(path="nowhere.jsonl"), make_tokenizer())
    with pytest.raises(ValueError, match="no directory"):
        prompts.load_tokenizer(tmp_path / "none")
    with pytest.raises(ValueError, match=r"holds none of tokenizer.json"):
        prompts.load_tokenizer(tmp_path)


def test_a_tokenizer_loads_from_its_directory(tmp_path):
    make_tokenizer(CHAT).save_pretrained(tmp_path)
    loaded = prompts.load_tokenizer(tmp_path)
    assert loaded.chat_template == CHAT
    assert prompts.encode("2 plus 2", loaded) == (4, 102, 4)
