# SPDX-License-Identifier: Apache-2.0
"""Writes a Qwen-VL as llama.cpp reads it: the language model in one GGUF file, the vision tower in another (mmproj).

Names, keys and layouts are those of llama.cpp's own convert_hf_to_gguf.py, for Qwen2-VL, Qwen2.5-VL and Qwen3-VL. Token
ids are kept, so that what llama-server drafts needs no translation, and the bounds of a picture's size are the model's
own. Takes the package gguf.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.front import ModelFront
from dsd_ros.vlm.loading import load_front
from dsd_ros.vlm.settings import ModelSettings

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_FILES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
_ARCHITECTURES = {
    "qwen2_vl": (gguf.MODEL_ARCH.QWEN2VL, gguf.VisionProjectorType.QWEN2VL),
    "qwen2_5_vl": (gguf.MODEL_ARCH.QWEN2VL, gguf.VisionProjectorType.QWEN25VL),
    "qwen3_vl": (gguf.MODEL_ARCH.QWEN3VL, gguf.VisionProjectorType.QWEN3VL),
}
_WINDOW = 112  # pixels, of Qwen2.5-VL's vision tower: llama.cpp knows no other
# Pre-tokenizers that llama.cpp has under a name, by the pattern of their Split.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def export_gguf(model: str, folder: Path, kind: str = "f16") -> list[Path]:
    """Write ``model`` (directory or hub id) into ``folder`` and return the files: MODEL.gguf and mmproj-MODEL.gguf.

    kind: of ``TYPES``, the format of matrices. ModelError for a model that is no Qwen-VL, or whose tokenizer llama.cpp
    would read otherwise.
    """
    front = load_front(ModelSettings(model))
    if front.kind not in _ARCHITECTURES:
        raise ModelError(f"{front.name} is no Qwen-VL; convert it with llama.cpp's own convert_hf_to_gguf.py")
    config = _config(front)
    _check(front, config)
    name = front.name.rpartition("/")[2]
    text, vision = folder / f"{name}.gguf", folder / f"mmproj-{name}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    _write_text(text, front, config, kind)
    _write_vision(vision, front, config, kind)
    return [text, vision]


def _check(front: ModelFront, config: Any) -> None:
    """ModelError for what llama.cpp reads otherwise."""
    _pre_tokenizer(front)
    if front.kind == "qwen2_5_vl" and (size := config.vision_config.window_size) != _WINDOW:
        raise ModelError(f"{front.name} has windows of {size} pixels, and llama.cpp reads all as {_WINDOW}")


def _config(front: ModelFront) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(front.directory), local_files_only=True)


def _tensors(front: ModelFront) -> Iterator[tuple[str, np.ndarray]]:
    """Names as in Qwen2-VL's files, and float32."""
    from safetensors import safe_open

    for file in sorted(front.directory.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                plain = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
                yield plain, weights.get_tensor(name).float().numpy()


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """Vectors and tables of positions stay float32; a patch's kernel is no matrix, which only float types can hold."""
    type_ = TYPES["f32" if values.ndim == 1 or "position_embd" in name else kind]
    if kind == "q8_0" and (values.ndim > 2 or values.shape[-1] % 32):
        type_ = TYPES["f16"]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), type_), raw_dtype=type_)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------------------------------------- language model


def _write_text(path: Path, front: ModelFront, config: Any, kind: str) -> None:
    text = config.get_text_config()
    arch = _ARCHITECTURES[front.kind][0]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(front.name)
    writer.add_file_type(_FILES[kind])
    writer.add_block_count(text.num_hidden_layers)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    rope = text.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if deep := getattr(config.vision_config, "deepstack_visual_indexes", None):
        writer.add_num_deepstack_layers(len(deep))
    _add_tokenizer(writer, front)
    names = gguf.get_tensor_name_map(arch, text.num_hidden_layers)
    for name, values in _tensors(front):
        if not name.startswith("visual."):
            _add(writer, _mapped(names, name), values, kind)
    _finish(writer)


def _mapped(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ModelError(f"there is no place in llama.cpp's model for the tensor {name}")
    return found


def _add_tokenizer(writer: gguf.GGUFWriter, front: ModelFront) -> None:
    value = json.loads(front.tokenizer.to_str())
    ids = {id_: (text, gguf.TokenType.NORMAL) for text, id_ in value["model"]["vocab"].items()}
    for token in value["added_tokens"]:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        ids[token["id"]] = (token["content"], kind)
    rows = [ids.get(id_, (f"[PAD{id_}]", gguf.TokenType.UNUSED)) for id_ in range(front.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(front))
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    merges = value["model"].get("merges") or []
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    end = front.tokenizer.token_to_id("<|im_end|>")
    writer.add_eos_token_id(min(front.eos_token_ids) if end is None else end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(front.template.chat_template)


def _pre_tokenizer(front: ModelFront) -> str:
    """llama.cpp's name of the pre-tokenizer; ModelError for one without."""
    value = json.loads(front.tokenizer.to_str())["pre_tokenizer"]
    steps = value.get("pretokenizers", [value]) if value else []
    # A literal that is split off, as the shipped pair's " Action:": the patterns after it split there in any case.
    steps = [step for step in steps if not (step["type"] == "Split" and "String" in step["pattern"])]
    match [step["type"] for step in steps]:
        case ["Split", "ByteLevel"] if steps[0]["pattern"]["Regex"] == _QWEN:
            return "qwen2"
        case ["Digits", "ByteLevel"] if steps[0]["individual_digits"] and steps[1].get("use_regex", True):
            return "smollm"
        case ["ByteLevel"] if steps[0].get("use_regex", True):
            return "gpt-2"
    raise ModelError(
        f"{front.name} splits text in a way that has no name here; convert it with llama.cpp's own "
        "convert_hf_to_gguf.py"
    )


# --------------------------------------------------------------------------------------------------- vision tower


def _write_vision(path: Path, front: ModelFront, config: Any, kind: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tower, images = config.vision_config, front.images
    assert images is not None
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_name(front.name)
    writer.add_file_type(_FILES[kind])
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(_ARCHITECTURES[front.kind][1])
    width = getattr(tower, "embed_dim", None) or tower.hidden_size
    wide = getattr(tower, "intermediate_size", None) or int(width * tower.mlp_ratio)
    writer.add_vision_projection_dim(config.get_text_config().hidden_size)
    writer.add_vision_image_size(_image_size(tower))
    writer.add_vision_patch_size(images.patch_size)
    writer.add_vision_embedding_length(width)
    writer.add_vision_feed_forward_length(wide)
    writer.add_vision_block_count(tower.depth)
    writer.add_vision_head_count(tower.num_heads)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_spatial_merge_size(images.merge_size)
    writer.add_vision_min_pixels(images.min_pixels)
    writer.add_vision_max_pixels(images.max_pixels)
    scale = Qwen2VLImageProcessorPil.from_pretrained(str(front.directory), local_files_only=True)
    writer.add_vision_image_mean(list(scale.image_mean))
    writer.add_vision_image_std(list(scale.image_std))
    if front.kind == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(_window_pattern(front, tower))
    deep = list(getattr(tower, "deepstack_visual_indexes", None) or ())
    if front.kind == "qwen3_vl":
        writer.add_vision_use_gelu(True)
        writer.add_vision_is_deepstack_layers([layer in deep for layer in range(tower.depth)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(tower.depth, 3))  # it has "merger.mlp.2" as a block's
    for name, values in _tensors(front):
        if name.startswith("visual."):
            for mapped, part in _vision_parts(names, front.kind, deep, name, values):
                _add(writer, mapped, part, kind)
    _finish(writer)


def _image_size(tower: Any) -> int:
    """Of the table of positions that Qwen3-VL has, in pixels; the others have none, and llama.cpp's script says 560."""
    places = getattr(tower, "num_position_embeddings", None)
    return int(places**0.5 * tower.patch_size) if places else 560


def _window_pattern(front: ModelFront, tower: Any) -> int:
    """Every how many layers one sees the whole picture."""
    whole = list(tower.fullatt_block_indexes)
    pattern = whole[0] + 1
    if whole != list(range(pattern - 1, tower.depth, pattern)):
        raise ModelError(f"{front.name}: llama.cpp reads no vision tower whose layers {whole} see the whole picture")
    return int(pattern)


def _vision_parts(
    names: gguf.TensorNameMap, kind: str, deep: list[int], name: str, values: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """What a tensor of the vision tower is in llama.cpp: one, or several."""
    parts = name.split(".")
    patch = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.V_ENC_EMBD_PATCH]
    if name == "visual.patch_embed.proj.weight":  # one kernel for each of the two frames
        yield f"{patch}.weight", values[:, :, 0]
        yield f"{patch}.weight.1", values[:, :, 1]
    elif name == "visual.patch_embed.proj.bias":
        yield f"{patch}.bias", values
    elif ".qkv." in name and kind != "qwen3_vl":
        for letter, part in zip("qkv", np.split(values, 3), strict=True):
            yield _mapped(names, name.replace("qkv", letter)), part
    elif parts[1] == "deepstack_merger_list":
        yield f"v.deepstack.{deep[int(parts[2])]}.{parts[3].removeprefix('linear_')}.{parts[4]}", values
    elif kind == "qwen3_vl" and parts[1] == "merger":
        place = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}[parts[2]]
        yield f"{place}.{parts[3]}", values
    else:
        yield _mapped(names, name), values
