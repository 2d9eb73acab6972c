"""The engine from the command line: lines in, lines out, and what is refused with its line."""

import json

import numpy as np
import pytest

from launch import generate
from tests import tiny_model
from tests.tiny_model import run_command, sections, write_config


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tiny_model.make_files(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        yield root


@pytest.fixture
def command(root, tmp_path, capfd, monkeypatch):
    """Runs the command on these lines; (exit code, output rows, stdout, stderr)."""
    tiny_model.share_programs(monkeypatch)

    def run(lines, *argv):
        config = write_config(tmp_path / "tiny.py", sections(root))
        prompts, out = tmp_path / "prompts.jsonl", tmp_path / "new" / "out.jsonl"
        prompts.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        code, stdout, stderr = run_command(
            capfd, generate.main, f"--config={config}", f"--prompts={prompts}", f"--out={out}", *argv
        )
        assert "Traceback" not in stderr
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return code, rows, stdout, stderr

    return run


def test_lines_come_back_in_order_with_what_was_asked(command, tmp_path):
    """A6, H8: per-line sampling, samples side by side, one log-prob a token, the result on stdout and on disk."""
    lines = [
        {"prompt": "12 plus 1?", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "12 plus 1?"}], "temperature": 0},
        {"prompt": "12 plus 1?", "temperature": 0.0, "max_tokens": 5},
        {"prompt": "a b", "stop": "7", "top_k": 2},
    ]
    code, rows, stdout, _ = command(lines, "--samples=2", f"--json={tmp_path / 'result.json'}")
    result = json.loads(stdout.splitlines()[-1])
    assert code == 0 and result == json.loads((tmp_path / "result.json").read_text())
    assert (result["responses"], result["tokens"]) == (8, sum(len(r["token_ids"]) for r in rows))
    assert len(rows) == 8
    for row in rows:
        assert len(row["logprobs"]) == len(row["token_ids"]) > 0 and max(row["logprobs"]) <= 0.0
        # In a log-prob's place the tokenizer's text of the ids, without special tokens.
        assert row["text"] == "".join(tiny_model.TOKENS[i] for i in row["token_ids"] if i > 3)
        assert row["accept_len"] == len(row["token_ids"]) / row["rounds"] >= 1.0
    assert [len(row["token_ids"]) <= 3 for row in rows[:2]] == [True, True]
    assert rows[0]["token_ids"] != rows[1]["token_ids"]
    assert rows[2]["token_ids"] == rows[3]["token_ids"] and rows[4]["token_ids"] == rows[5]["token_ids"]
    for row in rows[6:]:
        assert "7" not in row["text"][:-1]
        assert row["finish_reason"] == ("stop" if "7" in row["text"] or row["token_ids"][-1] in (2, 3) else "length")


def test_a_line_may_hold_any_character(command):
    """A JSON string may hold U+2028 as it is: it ends no line."""
    code, rows, _, stderr = command(['{"prompt": "1", "temperature": 0, "max_tokens": 2, "stop": "\u2028"}\n'])
    assert (code, len(rows)) == (0, 1), stderr
    assert np.isfinite(rows[0]["logprobs"]).all()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "got no prompts"),
        ([{"prompt": "1"}, "{'prompt': 1}\n"], "prompts.jsonl:2: "),
        ([{"prompt": "1"}, "\n", {"prompt": ""}], "prompts.jsonl:3: got prompt '', expected non-empty text"),
        (
            [{"prompt": "1" * 60}],
            "prompts.jsonl:1: request 0: got 60 prompt tokens and max_tokens 12, expected at",
        ),
        ([{"prompt": "1", "max_tokens": 2.5}], "prompts.jsonl:1: sampling.max_tokens: got 2.5 (float), expected int"),
        ([{"prompt": "1", "temperature": "hot"}], "prompts.jsonl:1: sampling.temperature: got 'hot' (str)"),
        ([{"prompt": "1", "top_p": 0}], "prompts.jsonl:1: sampling: sampling.top_p: got 0.0, expected in (0, 1]"),
        ([{"prompt": "1", "seed": 3}], "prompts.jsonl:1: got unknown keys ['seed']"),
        ([{"prompt": "1", "repetition_penalty": 1.5}], "prompts.jsonl:1: got unknown keys ['repetition_penalty']"),
        ([{"prompt": "1", "min_new_tokens": 6}], "prompts.jsonl:1: got unknown keys ['min_new_tokens']"),
        ([{"prompt": "1", "messages": []}], "expected an object with either 'prompt' or 'messages'"),
        ([{"messages": [{"role": "robot", "content": "1"}]}], "prompts.jsonl:1: messages: got role 'robot'"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(command, lines, message):
    """A15, A16: penalties and least lengths among them: refused, not taken and forgotten."""
    code, rows, stdout, stderr = command(lines)
    assert (code, rows, stdout) == (2, [], "") and message in stderr


def test_a_missing_file_or_shard_is_refused(command, root, tmp_path):
    code, _, _, stderr = command([], "--prompts=nowhere.jsonl")
    assert code == 2 and "--prompts: got 'nowhere.jsonl', which is no file" in stderr
    code, _, _, stderr = command([{"prompt": "1"}], f"--out={tmp_path}")
    assert code == 2 and "which is a directory" in stderr
    tiny_model.write_model(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    code, _, _, stderr = command([{"prompt": "1"}], f"--config.model.path={tmp_path / 'broken'}")
    assert code == 2 and "safetensors" in stderr
