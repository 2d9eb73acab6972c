"""From a task's record to the token ids of its prompt, by the tokenizer's own chat template."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2

from tlt_jax.rl import answers

Message = dict[str, str]  # {"role", "content"}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_ROLES = ("system", "user", "assistant", "tool")


def load_tokenizer(directory: str | pathlib.Path):
    """The tokenizer of a local Hugging Face directory; nothing is fetched.

    Raises:
      ValueError: no such directory, or none of the files that a tokenizer needs.
    """
    path = pathlib.Path(directory)
    if not path.is_dir():
        raise ValueError(f"tokenizer: no directory {str(path)!r}; expected a model directory in Hugging Face layout")
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"tokenizer: {str(path)!r} holds none of {', '.join(_TOKENIZER_FILES)}; copy them from the model"
        )
    from transformers import AutoTokenizer  # slow import

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def check_messages(value: Any) -> list[Message]:
    """A record's list of chat messages, or ValueError naming what is wrong with it."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages: got {value!r:.80}, expected a non-empty list of role and content")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"messages: got {message!r:.80}, expected an object with 'role' and a text 'content'")
        if message.get("role") not in _ROLES:
            raise ValueError(f"messages: got role {message.get('role')!r}, expected one of {_ROLES}")
    if not value[-1]["content"].strip():
        raise ValueError("messages: the last message is empty")
    return value


def make_messages(prompt: str, *, system: str = "", template: str = "{prompt}", few_shot=()) -> list[Message]:
    """Chat messages around one prompt: system text, worked examples, then the prompt in its template.

    `few_shot` holds (prompt, answer) pairs; they pass through the same template. Only `{prompt}` is replaced,
    so braces elsewhere stand for themselves.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for example, answer in few_shot:
        messages.append({"role": "user", "content": template.replace("{prompt}", example)})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": template.replace("{prompt}", prompt)}]


def render(messages: Sequence[Message], tokenizer) -> str:
    """The text that the model continues; plain paragraphs where the tokenizer has no chat template.

    Raises:
      ValueError: the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in messages)
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:  # many templates refuse an order of roles
        raise ValueError(f"messages: the tokenizer's chat template refuses them: {error}") from error


def encode(text: str, tokenizer) -> tuple[int, ...]:
    """Token ids of a rendered prompt. A chat template writes its own special tokens; plain text gets the usual."""
    return tuple(tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None))


def opens_think(text: str) -> bool:
    """True where the rendered prompt ends inside thinking, as some reasoning models' templates do."""
    return text.rfind(answers.THINK_OPEN) > text.rfind(answers.THINK_CLOSE)
