# SPDX-License-Identifier: Apache-2.0
"""Load and fingerprint a Qwen2-VL (such as the shipped pair), Qwen2.5-VL or Qwen3-VL, or a text-only Llama or Qwen.

A model is a directory or hub id with safetensors weights, or an adapter (``adapters``) of one beside it. A hub id is
looked up in the local cache and, unless ``HF_HUB_OFFLINE`` is set, downloaded.

Fingerprints are compared when robot and verifier connect. The two sides may pad their vocabularies differently but
must tokenize alike, so a tokenizer's fingerprint covers everything that decides that, in a canonical form.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsd_ros.decoding.generation import TokenOptions
from dsd_ros.paths import user_path
from dsd_ros.startup import import_transformers
from dsd_ros.vlm.adapters import ADAPTER_FILE, base_directory, merge_adapter, read_adapter
from dsd_ros.vlm.backbones import ImageProcessor, QwenVlBackbone, TextBackbone
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.exits import EXITS_FILE, load_exits
from dsd_ros.vlm.front import ModelFront
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import IMAGE_PLACEHOLDER, PromptTemplate, read_json
from dsd_ros.vlm.quantization import four_bit_options, quantize_on_cpu
from dsd_ros.vlm.settings import ModelSettings, generation_config, unfollowed_options

_log = logging.getLogger(__name__)
_CLASSES = {  # of transformers, by model_type
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DOWNLOADS = ["*.json", "*.jinja", "*.safetensors", "merges.txt"]  # of subfolders, too
WHOLE_FILE_BYTES = 256 << 20
_CHUNK = 1 << 20
_GGUF = "{0} is a GGUF file; python tools/convert_gguf.py {0} FOLDER makes a model of it"
_LFS = b"version https://git-lfs.github.com/spec/"
_SAMPLES = 64
_ADDED_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
_LOADING = threading.RLock()


def load_model(settings: ModelSettings, *, exits: bool = True) -> VisionLanguageModel:
    """Load a model and, unless ``exits`` is false, its early exits; ModelError, one sentence, if anything is wrong."""
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {settings.device} is not available here; use cpu")
    import_transformers()
    path = user_path(settings.path)
    if path.suffix == ".gguf" and path.is_file():
        raise ModelError(_GGUF.format(path))
    adapter = None
    if (path / ADAPTER_FILE).is_file():
        if settings.quantization == "4bit" and settings.device != "cpu":
            raise ModelError(f"{path} is merged into its base as it is read; use quantization none or int8 with it")
        adapter = read_adapter(path)
        front = _read_front(path, base_directory(adapter.base), settings)
    else:
        front = load_front(settings)
    hf = _load_weights(front.directory, front.kind, settings)
    if adapter is not None:
        merge_adapter(hf, adapter)
    backbone = TextBackbone(hf) if front.images is None else QwenVlBackbone(hf, front.images)
    if settings.quantization == "none":
        hf.to(settings.device)
    elif settings.device == "cpu":
        quantize_on_cpu(backbone, settings.quantization)
    model = VisionLanguageModel(
        backbone,
        front.tokenizer,
        front.template,
        name=front.name,
        eos_token_ids=front.eos_token_ids,
        fingerprint=front.fingerprint,
        tokenizer_fingerprint=front.tokenizer_fingerprint,
        token_options=front.token_options,
    )
    model.batches = settings.quantization != "int8" or settings.device != "cpu"
    if exits and adapter is None:
        dtype = hf.get_input_embeddings().weight.dtype
        sizes = model.hidden_size, model.num_layers
        model.exits = load_exits(front.directory, model.fingerprint, *sizes, dtype, model.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return model


def load_front(settings: ModelSettings, *, weights: bool = True) -> ModelFront:
    """All of a model but its weights, for an engine that holds those; ModelError, one sentence, if that is wrong.

    weights: whether the folder must have them all the same, since the model is known by their fingerprint.
    """
    directory = resolve_directory(settings.path, weights=weights)
    return _read_front(directory, directory, settings, weights)


def _read_front(directory: Path, base: Path, settings: ModelSettings, weights: bool = True) -> ModelFront:
    """``base``: the folder of an adapter's base model, whose tokenizer and configuration count; else ``directory``."""
    from transformers import AutoConfig, GenerationConfig

    _check_files(directory, weights)
    _check_files(base, weights)
    kind = _model_type(base)
    text_only = not kind.endswith("_vl")
    tokenizer, tokenizer_hash = _load_tokenizer(base)
    try:
        config = AutoConfig.from_pretrained(str(base), local_files_only=True)
        stated = (base / "generation_config.json").exists()
        generation = GenerationConfig.from_pretrained(str(base), local_files_only=True) if stated else None
    except Exception as error:
        raise ModelError(f"the configuration in {base} cannot be read: {_first_line(error)}") from error
    _check_fit(base, config, tokenizer)
    if unfollowed := unfollowed_options(base):
        _log.warning(
            "%s: %s of generation_config.json is not followed; replies are not those of transformers' generate",
            base,
            ", ".join(unfollowed),
        )
    # The texts that the tokenizer always reads as special tokens.
    markers = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    return ModelFront(
        base,
        kind,
        config,
        tokenizer,
        PromptTemplate.from_directory(directory, text_only=text_only, markers=markers, prompt=settings.prompt),
        None if text_only else ImageProcessor(base),
        name=directory.resolve().name if user_path(settings.path).is_dir() else settings.path,
        eos_token_ids=_eos_token_ids(base, config, generation, tokenizer),
        fingerprint=model_fingerprint(directory) if weights else "",
        tokenizer_fingerprint=tokenizer_hash,
        token_options=_token_options(base),
    )


def _token_options(directory: Path) -> TokenOptions | None:
    try:
        return TokenOptions.read(generation_config(directory))
    except ValueError as error:
        raise ModelError(f"an option in {directory / 'generation_config.json'} cannot be used: {error}") from error


def _check_files(directory: Path, weights: bool) -> None:
    """ModelError for weights that are not a model's, and for the pointer that Git LFS leaves in a file's place."""
    names = sorted(path.name for path in directory.iterdir())
    if weights and not any(name.endswith(".safetensors") and name != "adapter_model.safetensors" for name in names):
        if "adapter_config.json" in names:
            raise ModelError(
                f"{directory} holds a LoRA adapter without its base; save both as one model (PEFT's merge_and_unload)"
            )
        for name in names:
            if name.endswith(".gguf"):
                raise ModelError(_GGUF.format(directory / name))
            if name.startswith("pytorch_model") and name.endswith(".bin"):
                raise ModelError(
                    f"{directory} holds pickled weights ({name}), which may run code when they are read; save them as "
                    "safetensors, as transformers' save_pretrained does"
                )
    for path in sorted([*directory.iterdir(), directory / EXITS_FILE]):
        suffixes = (".json", ".jinja", ".txt", *([".safetensors"] if weights else []))
        if path.suffix in suffixes and path.is_file():
            with path.open("rb") as stream:
                if stream.read(len(_LFS)) == _LFS:
                    raise ModelError(
                        f"{path} is a Git LFS pointer, not the file itself; run 'git lfs pull' in its repository"
                    )


def resolve_directory(path: str, *, weights: bool = True) -> Path:
    """The local directory of a model path or hub id, downloaded if that is allowed."""
    directory = user_path(path)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ModelError(f"{path} is a file; give the model's directory")
    if path.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(path) or directory.parent.is_dir():
        raise ModelError(
            f"there is no model directory {path}; check the path, or give a Hugging Face id "
            "such as Qwen/Qwen2-VL-2B-Instruct"
        )
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    try:
        wanted = [name for name in _DOWNLOADS if weights or name != "*.safetensors"]
        return Path(snapshot_download(path, allow_patterns=wanted, local_files_only=offline))
    except Exception as error:
        hint = "it is not in the local cache and HF_HUB_OFFLINE forbids downloading"
        if not offline:
            hint = str(error).strip().splitlines()[0]
        raise ModelError(f"model {path} is neither a directory nor available from the hub: {hint}") from error


def _model_type(directory: Path) -> str:
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"{directory} has no config.json; give a Hugging Face model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read as a model configuration: {error}") from error
    if kind not in _CLASSES:
        text = json.dumps(config.get("text_config", config))
        if re.search(r'"(linear_attention|full_attention_interval|conv|mamba\w*)"', text):
            raise ModelError(
                f"{directory} ({kind}) has layers with a running state, which cannot take a rejected draft token back; "
                "use a model whose layers all have attention, such as Qwen3-VL"
            )
        raise ModelError(
            f"{directory} holds a model of type {kind!r}; use one of {', '.join(_CLASSES)}, "
            "the last three for text alone"
        )
    return str(kind)


def _load_tokenizer(directory: Path) -> tuple[Any, str]:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path} is missing; copy it from the original model")
    try:
        serialized = read_tokenizer(path)
        return Tokenizer.from_str(serialized), tokenizer_fingerprint(serialized)
    except Exception as error:
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error


def read_tokenizer(path: Path) -> str:
    """A tokenizer.json as transformers reads it: with what tokenizer_config.json adds, no padding, no truncation.

    Qwen2-VL-2B-Instruct has its ``<|image_pad|>`` there alone. Raises OSError, or whatever unusable content leads to.
    """
    text = path.read_text(encoding="utf-8")
    value = json.loads(text)
    config = path.with_name("tokenizer_config.json")
    late: Any = read_json(config).get("added_tokens_decoder") if config.is_file() else None
    added = value.setdefault("added_tokens", [])
    known = {token["content"] for token in added}
    missing = [(int(id_), token) for id_, token in (late or {}).items() if token["content"] not in known]
    if not missing and value.get("padding") is None and value.get("truncation") is None:
        return text  # nearly always so; writing 150 000 tokens again takes tens of MB
    for id_, token in sorted(missing, key=lambda one: one[0]):
        added.append({**_ADDED_TOKEN, "normalized": not token.get("special"), **token, "id": id_})
    return json.dumps({**value, "padding": None, "truncation": None})


def _load_weights(directory: Path, kind: str, settings: ModelSettings) -> Any:
    import transformers

    quantized: Any = read_json(directory / "config.json").get("quantization_config") or {}
    if (method := quantized.get("quant_method", "bitsandbytes")) != "bitsandbytes":
        raise ModelError(
            f"{directory} holds weights quantized by {method}, which backend vllm alone reads; use the unquantized "
            "model, on the robot with quantization int8 or 4bit"
        )
    options = {"dtype": getattr(torch, settings.dtype), "attn_implementation": "sdpa", "output_loading_info": True}
    if settings.quantization == "4bit" and settings.device != "cpu":
        options |= four_bit_options(settings)
    try:
        with quiet_transformers():
            loaded: Any = getattr(transformers, _CLASSES[kind]).from_pretrained(
                str(directory), use_safetensors=True, local_files_only=True, **options
            )
    except Exception as error:
        raise ModelError(f"the model in {directory} cannot be loaded: {_first_line(error)}") from error
    return _checked(directory, *loaded)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _checked(path: Path, hf: Any, info: dict[str, Any]) -> Any:
    """The loaded model, frozen; ModelError if parts of it are missing."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights in {path} lack {len(missing)} tensors, {missing[0]} among them; "
            "the files are incomplete, fetch them again"
        )
    return hf.eval().requires_grad_(False)


def _check_fit(directory: Path, config: Any, tokenizer: Any) -> None:
    """Refuse files that do not belong together; they would run and answer nonsense."""
    text, tokens = config.get_text_config(), tokenizer.get_vocab_size(with_added_tokens=True)
    if tokens > text.vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has {tokens} tokens and the model {text.vocab_size} rows; "
            "the two do not belong together"
        )
    image = getattr(config, "image_token_id", None)  # text models have none
    if image is not None and tokenizer.token_to_id(IMAGE_PLACEHOLDER) != image:
        raise ModelError(
            f"{directory}: the tokenizer's {IMAGE_PLACEHOLDER} is not config.json's image token; "
            "the two do not belong together"
        )
    kinds = getattr(text, "layer_types", None) or ()  # Llama has one kind
    if any(kind != "full_attention" for kind in kinds):
        raise ModelError(f"{directory}: sliding-window attention is not supported; turn it off")
    rope = text.rope_parameters.get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ModelError(f"{directory}: rope type {rope!r} depends on the length; use a static one")


def _eos_token_ids(directory: Path, config: Any, generation: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a reply: those of generation_config.json and ``<|im_end|>``."""
    configured = None if generation is None else generation.eos_token_id
    if configured is None:
        configured = config.get_text_config().eos_token_id
    ids = set(configured) if isinstance(configured, (list, tuple)) else {configured}
    ids.add(tokenizer.token_to_id("<|im_end|>"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    known = frozenset(i for i in ids if isinstance(i, int) and 0 <= i < size)
    if not known:
        raise ModelError(f"{directory} names no token that ends a reply; set eos_token_id")
    return known


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers load one model at a time, without progress bars and load reports; errors are raised anyway.

    `from_pretrained` replaces methods of all models for its time. Of two at once, the later one would put back what
    the earlier one had replaced, and no model would share its embeddings with its LM head any more.
    """
    from transformers.utils import logging

    with _LOADING:
        verbosity = logging.get_verbosity()
        bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def tokenizer_fingerprint(serialized: str) -> str:
    """32 hex digits for a tokenizer's JSON: vocabulary, merges, added tokens, and how text is split."""
    value = json.loads(serialized)
    model = value["model"]
    canonical = {
        "type": model.get("type"),
        "vocab": model.get("vocab"),
        # Older versions write "a b", newer ones ["a", "b"].
        "merges": [m.split(" ") if isinstance(m, str) else m for m in model.get("merges", [])],
        "added": sorted(
            [token["id"], token["content"], bool(token.get("special"))] for token in value.get("added_tokens", [])
        ),
        "normalizer": value.get("normalizer"),
        "pre_tokenizer": value.get("pre_tokenizer"),
    }
    return _digest(canonical)


def model_fingerprint(directory: Path) -> str:
    """32 hex digits for a model directory: its configuration and its weights, not its early exits.

    Files up to 256 MiB are read whole. Of larger ones only the size, the safetensors header and 64 evenly spaced chunks
    of 1 MiB count: a retrained model differs, a flipped bit may not. Of an adapter the base's fingerprint counts, too.
    """
    if (directory / ADAPTER_FILE).is_file():
        return _digest([read_adapter(directory).base_fingerprint, _weights_digest(directory / ADAPTER_FILE)])
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for key in ("transformers_version", "_name_or_path", "torch_dtype", "dtype"):
        config.pop(key, None)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no *.safetensors weights; download or train the model")
    return _digest([config, [[file.name, _weights_digest(file)] for file in files]])


def file_fingerprint(file: Path) -> str:
    """32 hex digits for a model in one file, read as ``model_fingerprint`` reads weights."""
    return _digest(_weights_digest(file))


def _weights_digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if size <= WHOLE_FILE_BYTES:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        else:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, 64 << 20)))
            for sample in range(_SAMPLES):
                stream.seek((size - _CHUNK) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_CHUNK))
    return digest.hexdigest()


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
