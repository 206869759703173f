# SPDX-License-Identifier: Apache-2.0
"""Prompts: one user turn of text, then the image, or a whole conversation, in the model's own chat template.

The text comes first so that, under causal attention, the image tokens attend to the instruction. Between text and
image come the pictures of earlier steps, if any, each with the action taken at that step.

A model directory may contain ``dsd.json``: ``{"format": 1, "prompt": "...{instruction}...", "past":
"...{image}...{action}...", "present": "...", "document_prompt": "...{document}...{question}...",
"not_told": "..."}``; only format and prompt are required. Another file of this form may take its place. Without
either, a Qwen2-VL gets ``DEFAULT_PROMPT`` and a text-only model just the instruction.
"""

from __future__ import annotations

import json
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dsd_ros.limits import MAX_CHAT_BYTES, MAX_INSTRUCTION_CHARS
from dsd_ros.paths import config_directory, user_path
from dsd_ros.startup import quick_import
from dsd_ros.vlm.errors import ModelError, PromptError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DSD_FILE = "dsd.json"
DSD_FORMAT = 1
MAX_ACTION_CHARS = 256
MAX_MESSAGES = 256  # of a conversation
IMAGE_PLACEHOLDER = "<|image_pad|>"
_RENDER_S = 2.0  # to render once, watched; the longest templates take a tenth
HIDDEN = "\0"  # around a marker that is to stay text

DEFAULT_PROMPT = (
    "You steer a four-legged robot through a room. The image is what its front camera sees now. "
    "The robot carries out one action, then you are asked again with a new image.\n"
    "Instruction: {instruction}\n"
    "Answer on one single line: first one short sentence about where the goal is and what to do, "
    "then, at the very end, 'Action: ' and exactly one of these actions:\n"
    "forward 25 cm, forward 50 cm, forward 75 cm, "
    "turn left 15 degrees, turn left 30 degrees, turn left 45 degrees, "
    "turn right 15 degrees, turn right 30 degrees, turn right 45 degrees, stop\n"
    "Choose stop only when the goal is reached. Write nothing after the action. "
    "Example: The red chair is ahead on the left. Action: turn left 15 degrees"
)

TEXT_PROMPT = "{instruction}"
DOCUMENT_PROMPT = "{document}\n\n{question}"
NOT_KNOWN = "I do not know."
DEFAULT_PAST = "\nBefore: {image} Action: {action}"  # for each earlier step
DEFAULT_PRESENT = "\nNow: "  # between earlier pictures and the present one

# Qwen2-VL's turn format without its fixed system message, which only costs a small model time.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def check_text(text: str, what: str, limit: int) -> str:
    """A text as the model reads it: white space collapsed, Unicode composed (NFC).

    PromptError when it is longer than ``limit`` characters, or contains control characters or a chat marker such as
    ``<|im_end|>``, with which it could pose as another turn or an image.
    """
    if len(text) > limit:
        raise PromptError(f"{what} has {len(text)} characters; shorten it to {limit} or fewer")
    text = " ".join(unicodedata.normalize("NFC", text).split())
    if "<|" in text or "|>" in text:
        raise PromptError(f"{what} contains a chat marker ('<|' or '|>'); remove it")
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise PromptError(f"{what} contains control characters; remove them")
    return text


Part = str | None  # of a message: text, or None for the next picture
Turn = tuple[str, list[Part]]  # a message: its role and parts
ROLES = ("system", "user", "assistant")


class Chat(str):
    """A conversation in an instruction's place: JSON of ``[[role, [part, ...]], ...]``, as it travels.

    A part is a text, or null for the next of the pictures, of which the reply's present one is the last. A model reads
    these texts as they are, without the prompt of its ``dsd.json``; a chat marker in them stays text.
    """

    __slots__ = ()

    @classmethod
    def of(cls, turns: Iterable[tuple[str, Sequence[Part]]]) -> Chat:
        """The conversation of these messages, its Unicode composed (NFC); PromptError as from ``turns``."""
        composed = [
            (role, [part if part is None else unicodedata.normalize("NFC", part) for part in parts])
            for role, parts in turns
        ]
        chat = cls(json.dumps(composed, ensure_ascii=False, separators=(",", ":")))
        _ = chat.turns
        return chat

    @property
    def turns(self) -> list[Turn]:
        """Its messages; PromptError when there are too many or too long ones, or it is no conversation."""
        try:
            size, turns = len(self.encode()), json.loads(self)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"this is no conversation: {error}") from error
        if size > MAX_CHAT_BYTES:
            raise PromptError(f"the conversation takes {size} bytes; shorten it to {MAX_CHAT_BYTES} or fewer")
        if not (isinstance(turns, list) and 1 <= len(turns) <= MAX_MESSAGES and all(map(_is_turn, turns))):
            raise PromptError(
                f"this is no conversation of 1 to {MAX_MESSAGES} messages, each a role ({', '.join(ROLES)}) and parts"
            )
        for text in (part for _, parts in turns for part in parts if part is not None):
            if HIDDEN in text or any("\ud800" <= letter <= "\udfff" for letter in text):
                raise PromptError("the conversation contains the control character NUL or half a letter; remove it")
        return [(role, parts) for role, parts in turns]

    @property
    def pictures(self) -> int:
        """How many pictures it shows."""
        return sum(part is None for _, parts in self.turns for part in parts)


def _is_turn(turn: Any) -> bool:
    """Whether this is a message as JSON holds it."""
    if not (isinstance(turn, list) and len(turn) == 2 and turn[0] in ROLES and isinstance(turn[1], list)):
        return False
    return all(part is None or isinstance(part, str) for part in turn[1])


def check_instruction(instruction: str, what: str = "the instruction", limit: int = MAX_INSTRUCTION_CHARS) -> str:
    """``check_text`` of an instruction, which must not be empty; a conversation stays as it is."""
    if isinstance(instruction, Chat):
        _ = instruction.turns
        return instruction
    if not isinstance(instruction, str):
        raise PromptError(f"{what} must be text, not {type(instruction).__name__}")
    if not (text := check_text(instruction, what, limit)):
        raise PromptError(f"{what} is empty; say what to do: 'find the silver bottle'")
    return text


def check_action(action: str) -> str:
    """The action of an earlier step as the model reads it. PromptError as for ``check_instruction``."""
    return check_instruction(action, "the action of an earlier step", MAX_ACTION_CHARS)


@dataclass(frozen=True)
class PromptTemplate:
    """A model's prompt, which contains ``{instruction}``, and its chat template.

    past: for each earlier step, contains ``{image}`` and ``{action}``. present: comes before the present picture
    when there are earlier ones. text_only: for a model without pictures. variables: what else the chat template
    may use, such as ``bos_token``. markers: the tokenizer's special tokens; no instruction may contain one.
    not_told: the one token by which a reader says that its document does not tell what comes next; "" if it has none.
    """

    prompt: str = DEFAULT_PROMPT
    chat_template: str = CHAT_TEMPLATE
    text_only: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    markers: tuple[str, ...] = ()
    past: str = DEFAULT_PAST
    present: str = DEFAULT_PRESENT
    document_prompt: str = DOCUMENT_PROMPT
    not_told: str = ""

    def __post_init__(self) -> None:
        for what, text, names in (
            ("", self.prompt, ("{instruction}",)),
            (" for a document", self.document_prompt, ("{document}", "{question}")),
            (" for an earlier step ('past')", self.past, ("{image}", "{action}")),
        ):
            if any(text.count(name) != 1 for name in names):
                raise ModelError(f"a model's prompt{what} must contain {' and '.join(names)} exactly once")
        if "<|" in self.prompt + self.past + self.present + self.document_prompt:
            raise ModelError("a model's prompt must not contain chat markers ('<|'); use the chat template")

    @classmethod
    def from_directory(
        cls, directory: str | Path, *, text_only: bool = False, markers: tuple[str, ...] = (), prompt: str = ""
    ) -> PromptTemplate:
        """Read ``dsd.json`` and the chat template of a model directory; ModelError names the file at fault.

        ``prompt``: a preset or a file that takes the place of ``dsd.json``, see ``prompt_file``.
        The template is in ``chat_template.jinja``, else in ``tokenizer_config.json``, ``chat_template.json`` or
        ``processor_config.json``; of several that have names, the one named ``default``.
        """
        directory = Path(directory)
        texts = read_texts(prompt_file(prompt) or directory / DSD_FILE, TEXT_PROMPT if text_only else DEFAULT_PROMPT)
        variables = _read_variables(directory) if text_only else {}
        path, chat_template = _read_chat_template(directory)
        template = cls(chat_template=chat_template, text_only=text_only, variables=variables, markers=markers, **texts)
        try:
            _limited(partial(template.render_text, "stop"))
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
        return template

    def text(self, instruction: str) -> str:
        """The user's text: the prompt with the checked instruction filled in."""
        instruction = check_instruction(instruction)
        self.check_markers("instruction", instruction)
        return self.prompt.replace("{instruction}", instruction)

    def render(self, instruction: str, image_tokens: int, past: Sequence[tuple[int, str]] = ()) -> str:
        """The whole prompt up to the start of the reply, for ``prompt_ids``.

        instruction: or a ``Chat``, whose pictures are those of ``past`` and the present one. image_tokens: how many
        placeholders the image takes; 0 for no image. past: for each earlier step, oldest first, how many placeholders
        its picture takes, and the action taken. PromptError for instruction and actions, ModelError for the template.
        """
        counts = [count for count, _ in past] + [image_tokens] * (image_tokens > 0)
        rendered = self.render_messages(self.messages(instruction, image_tokens, past))
        if self.text_only:
            return rendered
        first, *others = rendered.split(IMAGE_PLACEHOLDER)
        if len(others) != len(counts):
            raise ModelError(
                f"the model's chat template wrote {len(others)} image placeholders for "
                f"{len(counts)} images; use the chat template of a Qwen2-VL model"
            )
        return first + "".join(IMAGE_PLACEHOLDER * count + rest for count, rest in zip(counts, others, strict=True))

    def messages(
        self, instruction: str, image_tokens: int, past: Sequence[tuple[int, str]] = ()
    ) -> list[dict[str, Any]]:
        """What the chat template is given, see ``render``: roles, and texts or lists of parts; markers are hidden."""
        shown = len(past) + (image_tokens > 0)
        if self.text_only and past:
            raise PromptError("this model reads text alone; ask it without earlier steps")
        if isinstance(instruction, Chat):
            if instruction.pictures != shown:
                raise PromptError(f"a conversation with {instruction.pictures} pictures comes with {shown}")
            return [{"role": role, "content": self._content(parts)} for role, parts in instruction.turns]
        content = self._instructed(instruction, [action for _, action in past])
        if isinstance(content, list) and image_tokens > 0:
            content.append({"type": "image"})
        return [{"role": "user", "content": content}]

    def render_text(self, text: str) -> str:
        """The whole prompt for a user's text, unchanged and without a picture; ModelError for the template."""
        content = text if self.text_only else [{"type": "text", "text": text}]
        return self.render_messages([{"role": "user", "content": content}])

    def render_messages(self, messages: list[dict[str, Any]]) -> str:
        """The whole prompt for messages (role, content), unchanged, up to the next reply; ModelError."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = dict(self.variables)
        try:
            # In jinja's sandbox: a template must not reach into this process.
            result: Any = render_jinja_template(
                [messages], chat_template=self.chat_template, add_generation_prompt=True, **variables
            )
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"the model's chat template does not render: {reason}") from error
        return str(result[0][0])

    def _instructed(self, instruction: str, actions: Sequence[str]) -> str | list[dict[str, str]]:
        """The user's turn before the present picture; templates of text-only models take plain strings."""
        text = self.text(instruction)
        if self.text_only:
            return text
        content = [{"type": "text", "text": text}]
        for action in actions:
            content += self._past_parts(action)
        return [*content, {"type": "text", "text": self.present}] if actions else content

    def _content(self, parts: list[Part]) -> str | list[dict[str, str]]:
        """A message of a conversation. Texts that follow each other are joined first: together they may be a marker."""
        if self.text_only:
            return self._hidden("\n".join(filter(None, parts)))
        content: list[dict[str, str]] = []
        for part in parts:
            if part is None:
                content.append({"type": "image"})
            elif content and "text" in content[-1]:
                content[-1]["text"] += part
            else:
                content.append({"type": "text", "text": part})
        return [{**each, "text": self._hidden(each["text"])} if "text" in each else each for each in content]

    def _hidden(self, text: str) -> str:
        """``text`` with its markers between two HIDDEN each, in hexadecimal, where no template sees them."""
        markers = sorted({*self.markers, IMAGE_PLACEHOLDER}, key=len, reverse=True)
        return re.sub(
            "|".join(map(re.escape, markers)), lambda found: f"{HIDDEN}{found[0].encode().hex()}{HIDDEN}", text
        )

    def _past_parts(self, action: str) -> list[dict[str, str]]:
        """One earlier step as parts of the user's turn."""
        action = check_action(action)
        self.check_markers("action of an earlier step", action)
        parts: list[dict[str, str]] = []
        for number, text in enumerate(self.past.split("{image}")):
            if number:
                parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text.replace("{action}", action)})
        return parts

    def check_markers(self, what: str, text: str) -> None:
        """PromptError for a text that contains one of the tokenizer's special tokens."""
        for marker in self.markers:
            if marker in text:
                raise PromptError(f"the {what} contains the model's marker {marker!r}; remove it")


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a rendered prompt. A marker that stood in a conversation is tokenized letter by letter: as text."""
    ids: list[int] = []
    for number, part in enumerate(prompt.split(HIDDEN)):
        for piece in bytes.fromhex(part).decode() if number % 2 else [part]:
            ids += tokenizer.encode(piece, add_special_tokens=False).ids
    return ids


def shown_markers(prompt: str) -> str:
    """A rendered prompt for what takes text alone: a marker that stood in a conversation gets a space, and is text."""
    parts = prompt.split(HIDDEN)
    parts[1::2] = [marker[0] + " " + marker[1:] for marker in (bytes.fromhex(part).decode() for part in parts[1::2])]
    return "".join(parts)


def prompt_file(named: str) -> Path | None:
    """The file of prompts that is meant: one of config/prompts by its name, or any other; None for no name."""
    if not named:
        return None
    presets = {path.stem: path for path in sorted((config_directory() / "prompts").glob("*.json"))}
    path = presets.get(named) or user_path(named)
    if not path.is_file():
        raise ModelError(f"there is no prompt {named!r}; name {', '.join(presets)}, or a file as dsd.json")
    return path


def read_texts(path: Path | None, default: str) -> dict[str, str]:
    """The prompts in a file such as ``dsd.json``, or the defaults if there is none."""
    texts = {
        "prompt": default,
        "past": DEFAULT_PAST,
        "present": DEFAULT_PRESENT,
        "document_prompt": DOCUMENT_PROMPT,
        "not_told": "",
    }
    if path is None or not path.exists():
        return texts
    settings = read_json(path)
    if settings.get("format") != DSD_FORMAT:
        raise ModelError(
            f"{path} has format {settings.get('format')!r}; this version of dsd_ros reads format {DSD_FORMAT}"
        )
    found = {"prompt": None, **{name: settings[name] for name in texts if name in settings}}
    for name, text in found.items():
        if not isinstance(text, str):
            raise ModelError(f"{path} has no text under {name!r}; write one")
        texts[name] = text
    return texts


def _limited(render: Callable[[], object]) -> None:
    """Render once; ModelError if that takes ``_RENDER_S`` of processor time, as loops without an end do."""
    quick_import("transformers.utils.chat_template_utils")  # not within the limit
    until, before = time.thread_time() + _RENDER_S, sys.gettrace()

    def watch(frame: FrameType, *_: object) -> Any:
        if time.thread_time() > until:
            raise TimeoutError(f"it takes more than {_RENDER_S:g} s of processor time; does a loop in it end?")
        return watch if frame.f_code.co_filename == "<template>" else None  # jinja's name; other loops end anyway

    sys.settrace(watch)  # of this thread; from outside, a thread cannot be ended
    try:
        render()
    finally:
        sys.settrace(before)


def _read_chat_template(directory: Path) -> tuple[Path, str]:
    """A model's chat template, and the file that holds it."""
    for path in (directory / "chat_template.jinja", directory / "additional_chat_templates" / "default.jinja"):
        try:
            return path, path.read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
        path = directory / name
        template: Any = read_json(path).get("chat_template") if path.exists() else None
        if isinstance(template, list):  # several, by name
            template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        if isinstance(template, dict):
            template = template.get("default")
        if isinstance(template, str):
            return path, template
    raise ModelError(
        f"{directory} has no chat template, or none named 'default'; copy chat_template.jinja from the original model"
    )


def _read_variables(directory: Path) -> dict[str, str]:
    """The tokenizer's begin and end tokens, for the chat template."""
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    tokens = {name: settings.get(name) for name in ("bos_token", "eos_token")}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: token if isinstance(token, str) else "" for name, token in contents.items()}


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file; ModelError for any other content."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value
