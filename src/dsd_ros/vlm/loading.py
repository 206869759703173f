"""Loading any Qwen2-VL, the shipped pair or a stock 2B, 7B or 72B, from a directory or a hub id.

Models of text alone, Llama and Qwen2, are loaded the same way, or a Llama from a GGUF file. Weights are
otherwise read from safetensors only. A path that does not exist is refused at once; a hub id is
looked up in the local cache and, unless ``HF_HUB_OFFLINE`` is set, downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsd_ros.vlm.backbones import QwenVlBackbone, TextBackbone
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.exits import load_exits
from dsd_ros.vlm.fingerprints import file_fingerprint, model_fingerprint, tokenizer_fingerprint
from dsd_ros.vlm.gguf import read_gguf
from dsd_ros.vlm.images import ImageProcessor
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import IMAGE_PLACEHOLDER, TEXT_PROMPT, PromptTemplate

__all__ = ["ModelError", "ModelSettings", "load_model", "resolve_directory"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("none", "int8", "4bit")
_CLASSES = {  # of transformers, by model_type
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DOWNLOADS = ["*.json", "*.jinja", "*.safetensors", "merges.txt"]


@dataclass(frozen=True)
class ModelSettings:
    """Which model, where it runs and how it is stored there; ModelError on a value out of place."""

    path: str = field(metadata={"help": "model directory or Hugging Face id"})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda or cuda:N"})
    dtype: str = field(default="float32", metadata={"help": "precision of the weights", "choices": tuple(DTYPES)})
    quantization: str = field(
        default="none", metadata={"help": "int8 on the CPU, 4bit on CUDA", "choices": QUANTIZATIONS}
    )
    threads: int = field(
        default=0, metadata={"help": "CPU threads of this process's models; 0: torch's choice", "min": 0}
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        if not self.path:
            raise ModelError("no model is named; give a model directory or a Hugging Face id")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ModelError(f"unknown device {self.device!r}; use cpu, cuda or cuda:N")
        if self.dtype not in DTYPES:
            raise ModelError(f"unknown dtype {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ModelError(f"unknown quantization {self.quantization!r}; use one of {', '.join(QUANTIZATIONS)}")
        if self.threads < 0:
            raise ModelError(f"threads is {self.threads}; use 0 (torch's choice) or more")
        on_cuda = self.device.startswith("cuda")
        if self.quantization == "int8" and (on_cuda or self.dtype != "float32"):
            raise ModelError("int8 quantization is for the CPU in float32; on CUDA choose 4bit")
        if self.quantization == "4bit" and not on_cuda:
            raise ModelError("4bit quantization needs a CUDA device; on the CPU choose int8")


def load_model(settings: ModelSettings, *, exits: bool = True) -> VisionLanguageModel:
    """Load a model as the settings say; ModelError, one sentence, on anything wrong with it.

    Early exits beside the weights come along unless ``exits`` is false.
    """
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {settings.device} is not available here; use cpu")
    path = Path(settings.path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        model = _load_gguf(path, settings)
    else:
        model = _load_directory(resolve_directory(settings.path), settings, exits)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return model


def _load_directory(directory: Path, settings: ModelSettings, exits: bool) -> VisionLanguageModel:
    kind = _model_type(directory)
    text_only = kind != "qwen2_vl"
    images = None if text_only else ImageProcessor(directory)
    tokenizer, tokenizer_hash = _load_tokenizer(directory)
    markers = _markers(tokenizer) if text_only else ()
    template = PromptTemplate.from_directory(directory, text_only=text_only, markers=markers)
    hf = _load_weights(directory, kind, settings)
    backbone = TextBackbone(hf) if images is None else QwenVlBackbone(hf, images)
    _check_fit(directory, backbone, tokenizer)
    is_directory = Path(settings.path).is_dir()
    model = VisionLanguageModel(
        _stored(backbone, settings),
        tokenizer,
        template,
        name=directory.resolve().name if is_directory else settings.path,
        eos_token_ids=_eos_token_ids(directory, backbone, tokenizer),
        fingerprint=model_fingerprint(directory),
        tokenizer_fingerprint=tokenizer_hash,
    )
    if exits:
        model.exits = load_exits(
            directory,
            model.fingerprint,
            model.hidden_size,
            model.num_layers,
            backbone.language.embed_tokens.weight.dtype,
            model.device,
        )
    return model


def _load_gguf(path: Path, settings: ModelSettings) -> VisionLanguageModel:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    if settings.quantization == "4bit":
        raise ModelError(f"{path} is expanded as it is read; use quantization none or int8 with it")
    found = read_gguf(path)
    tokenizer = Tokenizer.from_str(found.tokenizer)
    with quiet_transformers():
        loaded: Any = LlamaForCausalLM.from_pretrained(
            None,
            config=found.config,
            state_dict=found.weights,
            output_loading_info=True,
            attn_implementation="sdpa",
            dtype=DTYPES[settings.dtype],
        )
    backbone = TextBackbone(_checked(path, *loaded))
    _check_fit(path, backbone, tokenizer)
    return VisionLanguageModel(
        _stored(backbone, settings),
        tokenizer,
        PromptTemplate(TEXT_PROMPT, found.chat_template, True, found.special_tokens, _markers(tokenizer)),
        name=path.name,
        eos_token_ids=_eos_token_ids(path, backbone, tokenizer),
        fingerprint=file_fingerprint(path),
        tokenizer_fingerprint=tokenizer_fingerprint(found.tokenizer),
    )


def resolve_directory(path: str) -> Path:
    """The local directory of a model path or hub id, downloaded where that is allowed."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ModelError(f"{path} is a file; give the model's directory")
    looks_local = path.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(path)
    if looks_local or directory.parent.is_dir():
        raise ModelError(
            f"there is no model directory {path}; check the path, or give a Hugging Face id "
            "such as Qwen/Qwen2-VL-2B-Instruct"
        )
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    try:
        return Path(snapshot_download(path, allow_patterns=_DOWNLOADS, local_files_only=offline))
    except Exception as error:
        hint = (
            "it is not in the local cache and HF_HUB_OFFLINE forbids downloading"
            if offline
            else str(error).strip().splitlines()[0]
        )
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
        raise ModelError(
            f"{directory} holds a model of type {kind!r}; only qwen2_vl can be used here, and for "
            "text alone llama and qwen2"
        )
    return str(kind)


def _load_tokenizer(directory: Path) -> tuple[Any, str]:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        serialized = path.read_text(encoding="utf-8")
        return Tokenizer.from_str(serialized), tokenizer_fingerprint(serialized)
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; copy it from the original model") from error
    except Exception as error:
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error


def _markers(tokenizer: Any) -> tuple[str, ...]:
    """What the tokenizer takes for special wherever it stands."""
    return tuple(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)


def _load_weights(directory: Path, kind: str, settings: ModelSettings) -> Any:
    import transformers

    options: dict[str, Any] = {"dtype": DTYPES[settings.dtype]}
    if settings.quantization == "4bit":
        options |= _four_bit_options(settings)
    try:
        with quiet_transformers():
            loaded: Any = getattr(transformers, _CLASSES[kind]).from_pretrained(
                str(directory),
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                attn_implementation="sdpa",
                **options,
            )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"the model in {directory} cannot be loaded: {reason}") from error
    return _checked(directory, *loaded)


def _checked(path: Path, hf: Any, info: dict[str, Any]) -> Any:
    """A loaded model, frozen, unless parts of it are missing."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights in {path} lack {len(missing)} tensors, {missing[0]} among them; "
            "the files are incomplete, fetch them again"
        )
    return hf.eval().requires_grad_(False)


def _stored(backbone: TextBackbone, settings: ModelSettings) -> TextBackbone:
    """The model where the settings want it, and as they want it stored."""
    if settings.quantization == "int8":
        _quantize_int8(backbone)
    elif settings.quantization == "none":
        backbone.hf.to(settings.device)
    return backbone


def _quantize_int8(backbone: TextBackbone) -> None:
    """Store the matrices of language layers and LM head as int8; activations stay float.

    The vision tower stays as it is: it runs once per image and is what small models are weakest at.
    Meant for drafts: a scale taken over all rows of a pass makes logits depend on how it is cut.
    """
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = {torch.nn.Linear: per_channel_dynamic_qconfig}
        quantize_dynamic(backbone.language, linear, inplace=True)
        quantize_dynamic(backbone.hf, {"lm_head": per_channel_dynamic_qconfig}, inplace=True)


def _four_bit_options(settings: ModelSettings) -> dict[str, Any]:
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("4bit quantization needs the package accelerate; install it, or use none")
    skip = ["lm_head", "model.visual", "visual"]
    if importlib.util.find_spec("bitsandbytes") is not None:
        from transformers import BitsAndBytesConfig

        config: Any = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=DTYPES[settings.dtype],
            llm_int8_skip_modules=skip,
        )
    elif importlib.util.find_spec("torchao") is not None:
        from torchao.quantization import Int4WeightOnlyConfig
        from transformers import TorchAoConfig

        config = TorchAoConfig(Int4WeightOnlyConfig(), modules_to_not_convert=skip)
    else:
        raise ModelError("4bit quantization needs bitsandbytes or torchao; install one, or use none")
    return {"quantization_config": config, "device_map": {"": settings.device}}


def _check_fit(directory: Path, backbone: TextBackbone, tokenizer: Any) -> None:
    """Refuse what would run and answer nonsense: files that do not belong together."""
    text = backbone.config
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if tokens > text.vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has {tokens} tokens and the model {text.vocab_size} rows; "
            "the two do not belong together"
        )
    image = getattr(backbone.hf.config, "image_token_id", None)  # text models have none
    if image is not None and tokenizer.token_to_id(IMAGE_PLACEHOLDER) != image:
        raise ModelError(
            f"{directory}: the tokenizer's {IMAGE_PLACEHOLDER} is not config.json's image token; "
            "the two do not belong together"
        )
    kinds = getattr(text, "layer_types", None) or ()  # Llama has one kind
    if any(kind != "full_attention" for kind in kinds):
        raise ModelError(f"{directory}: sliding-window attention is not supported; set it off")
    rope = text.rope_parameters.get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ModelError(f"{directory}: rope type {rope!r} depends on the length; use a static one")


def _eos_token_ids(directory: Path, backbone: TextBackbone, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a reply: those of generation_config.json, and always <|im_end|>."""
    generation = backbone.hf.generation_config
    configured = None if generation is None else generation.eos_token_id
    if configured is None:
        configured = backbone.config.eos_token_id
    ids = set(configured) if isinstance(configured, (list, tuple)) else {configured}
    ids.add(tokenizer.token_to_id("<|im_end|>"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    known = frozenset(i for i in ids if isinstance(i, int) and 0 <= i < size)
    if not known:
        raise ModelError(f"{directory} names no token that ends a reply; set eos_token_id")
    return known


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and load reports on a robot's console; what matters is raised."""
    from transformers.utils import logging

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
