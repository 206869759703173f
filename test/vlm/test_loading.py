# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TOKENS, make_tiny_model, make_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dsd_ros.decoding.generation import TokenOptions
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.paths import models_directory
from dsd_ros.vlm.errors import ModelError, PromptError
from dsd_ros.vlm.loading import ModelSettings, load_front, load_model, tokenizer_fingerprint
from dsd_ros.vlm.quantization import quantize_on_cpu

INSTRUCTION = "find the silver bottle"


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def test_a_loaded_model_says_what_it_is(model, model_directory):
    assert model.name == model_directory.name == "target"
    assert (model.vocab_size, model.num_layers, model.hidden_size) == (272, 2, 64)
    end = model.tokenizer.token_to_id("<|im_end|>")
    assert end in model.eos_token_ids and len(model.eos_token_ids) == 2
    assert len(model.fingerprint) == 32 and model.fingerprint != model.tokenizer_fingerprint
    ids = model.tokenizer.encode("Action: stop<|im_end|>").ids
    assert ids[-1] == end
    assert model.decode_text([*ids, TOKENS + 3]) == "Action: stop"
    assert not model.hf.training


def test_models_may_be_loaded_by_many_threads_at_once():
    """transformers alone cannot: tied weights stay missing from then on, in every later model too."""
    draft = str(models_directory() / "draft")  # its LM head is its embeddings
    with ThreadPoolExecutor(6) as pool:
        models = list(pool.map(lambda _: load_model(ModelSettings(draft)), range(12)))
    for model in (*models, load_model(ModelSettings(draft))):
        assert model.hf.get_input_embeddings().weight is model.hf.get_output_embeddings().weight


@pytest.mark.parametrize("nested", [False, True])
def test_stock_layout_loads_the_same(model, own_directory, picture, nested):
    """Qwen2-VL as published: flat configuration, mrope in rope_scaling, pixel bounds by name."""
    path = own_directory / "config.json"
    config = json.loads(path.read_text())
    text, vision = config.pop("text_config"), config.pop("vision_config")
    rope = text.pop("rope_parameters")
    flat = {k: v for k, v in text.items() if k not in ("model_type", "layer_types")}
    path.write_text(
        json.dumps(
            {
                **config,
                **flat,
                "rope_theta": rope["rope_theta"],
                "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
                "torch_dtype": "float32",
                "vision_config": {
                    "depth": vision["depth"],
                    "embed_dim": vision["embed_dim"],
                    "hidden_size": vision["hidden_size"],
                    "num_heads": vision["num_heads"],
                    "mlp_ratio": vision["mlp_ratio"],
                    "in_chans": 3,
                    "patch_size": 14,
                    "spatial_merge_size": 2,
                    "spatial_patch_size": 14,
                    "temporal_patch_size": 2,
                },
            }
        )
    )
    names = load_file(own_directory / "model.safetensors").keys()
    assert {"visual.patch_embed.proj.weight", "model.norm.weight", "lm_head.weight"} <= names
    (own_directory / "preprocessor_config.json").write_text(
        json.dumps({"min_pixels": 3136, "max_pixels": 28224, "patch_size": 14, "merge_size": 2})
    )
    template = (own_directory / "chat_template.jinja").read_text()
    (own_directory / "chat_template.jinja").unlink()
    edit_json(own_directory / "tokenizer_config.json", chat_template=template)
    if nested:  # as transformers 5 saves it
        old = own_directory / "preprocessor_config.json"
        (own_directory / "processor_config.json").write_text(
            json.dumps({"image_processor": json.loads(old.read_text()), "processor_class": "Qwen2VLProcessor"})
        )
        old.unlink()
    stock = load_model(ModelSettings(str(own_directory)))
    logits = stock.prefill(picture(), INSTRUCTION).next_logits()
    torch.testing.assert_close(logits, model.prefill(picture(), INSTRUCTION).next_logits())


def test_what_is_no_model_directory_is_named_with_the_remedy(own_directory, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(own_directory)
    (own_directory / "models").mkdir()
    for path, sentence in (
        ("/nowhere/at/all", "there is no model directory .*check the path"),
        ("~/nothing/here", "there is no model directory .*check the path"),
        ("a/b/c", "there is no model directory .*check the path"),
        ("models/target", "there is no model directory models/target"),  # no hub id, since its parent exists
        ("nobody-at-all/no-such-model", "HF_HUB_OFFLINE forbids downloading"),
        ("config.json", "is a file; give the model's directory"),
    ):
        with pytest.raises(ModelError, match=sentence):
            load_model(ModelSettings(path))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "cannot be read as a model configuration"),
        ("config.json", '{"model_type": "gpt2"}', "of type 'gpt2'; use one of qwen2_vl"),
        (
            "config.json",
            '{"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention", "full_attention"]}}',
            r"\(qwen3_5\) has layers with a running state, .*; use a model whose layers all have attention",
        ),
        ("config.json", '{"model_type": "qwen3_next", "full_attention_interval": 4}', "cannot take a rejected"),
        ("tokenizer.json", None, "is missing; copy it"),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("preprocessor_config.json", None, "is missing; copy it"),
        ("preprocessor_config.json", "[", "cannot be used"),
        ("preprocessor_config.json", '{"min_pixels": 1000000, "max_pixels": 100000}', "has min_pixels 1000000"),
        ("chat_template.jinja", None, "has no chat template"),
        ("dsd.json", '{"format": 2, "prompt": "{instruction}"}', "has format 2"),
        ("dsd.json", '{"format": 1}', "no text under 'prompt'"),
        ("dsd.json", '{"format": 1, "prompt": "go"}', r"must contain \{instruction\}"),
        ("model.safetensors", None, "holds no \\*.safetensors weights"),
        ("model.safetensors", "no tensors", "cannot be loaded"),
    ],
)
def test_damaged_directory(own_directory, name, content, sentence):
    path = own_directory / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match=sentence) as caught:
        load_model(ModelSettings(str(own_directory)))
    assert "\n" not in str(caught.value)


def test_missing_tensor(own_directory):
    path = own_directory / "model.safetensors"
    weights = load_file(path)
    name = next(n for n in weights if n.endswith("layers.1.mlp.up_proj.weight"))
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, .*layers.1.mlp.up_proj.weight"):
        load_model(ModelSettings(str(own_directory)))


@pytest.mark.parametrize("part", ["layers.0.mlp.up_proj", "lm_head", "patch_embed.proj"])
def test_a_weight_that_is_no_number_gives_a_sentence_and_no_reply(own_directory, picture, part):
    path = own_directory / "model.safetensors"
    weights = load_file(path)
    weights[next(n for n in weights if n.endswith(f"{part}.weight"))].view(-1)[7] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    damaged = load_model(ModelSettings(str(own_directory)))
    with pytest.raises(ModelError, match="computes values that are not numbers; fetch its weights again"):
        damaged.prefill(picture(), INSTRUCTION).next_logits()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["pytorch_model-00001-of-00002.bin"], "holds pickled weights .pytorch_model-0.*; save them as safetensors"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "holds a LoRA adapter without its base; save both as one model",
        ),
        (["adapter_config.json", "adapter_model.bin"], "holds a LoRA adapter without its base; save both as one model"),
        (["q4.gguf"], "q4.gguf is a GGUF file; python tools/convert_gguf.py .*q4.gguf FOLDER"),
    ],
)
@pytest.mark.parametrize("bare", [False, True])
def test_weights_of_another_kind_are_called_what_they_are(own_directory, files, sentence, bare):
    (own_directory / "model.safetensors").unlink()
    if bare:
        (own_directory / "config.json").unlink()
    for name in files:
        (own_directory / name).write_bytes(b"{}")
    with pytest.raises(ModelError, match=sentence):
        load_model(ModelSettings(str(own_directory)))


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "compressed-tensors"])
def test_quantized_weights_are_left_to_vllm(own_directory, method):
    edit_json(own_directory / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelError, match=f"quantized by {method}, which backend vllm alone reads; use the unquantized"):
        load_model(ModelSettings(str(own_directory)))
    assert load_front(ModelSettings(str(own_directory))).known_tokens == TOKENS


def test_tokenizer_of_another_model(own_directory):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"word{i}" for i in range(20)])
    tokenizer.save(str(own_directory / "tokenizer.json"))
    with pytest.raises(ModelError, match="283 tokens and the model 272 rows"):
        load_model(ModelSettings(str(own_directory)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"path": ""}, "no model is named"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int3"}, "dtype is 'int3'; use float32, bfloat16 or float16"),
        ({"quantization": "2bit"}, "quantization is '2bit'; use none, int8 or 4bit"),
        ({"quantization": "4bit", "dtype": "float16"}, "on the CPU needs dtype float32 or bfloat16, no float16"),
        ({"quantization": "int8", "device": "cuda"}, "on CUDA choose 4bit"),
        ({"threads": -1}, "threads is -1"),
    ],
)
def test_settings_out_of_place(settings, sentence):
    with pytest.raises(ModelError, match=sentence):
        ModelSettings(**{"path": "x", **settings})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_cuda_here(model_directory):
    with pytest.raises(ModelError, match="cuda is not available here; use cpu"):
        load_model(ModelSettings(str(model_directory), device="cuda"))


@pytest.mark.skipif(find_spec("accelerate") is not None, reason="accelerate is installed")
def test_four_bit_says_what_to_install(model_directory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match="needs the package accelerate; install it"):
        load_model(ModelSettings(str(model_directory), device="cuda", quantization="4bit"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.7), ("4bit", 0.4)])
def test_smaller_matrices_on_the_cpu(model, model_directory, picture, dtype, quantization, share):
    settings = ModelSettings(str(model_directory), dtype=dtype, quantization=quantization)
    smaller = load_model(settings)
    layer = smaller.hf.model.language_model.layers[0]
    for matrix in (smaller.hf.lm_head, layer.mlp.up_proj, layer.self_attn.q_proj):
        assert not isinstance(matrix, torch.nn.Linear) or "quantized" in type(matrix).__module__
    assert isinstance(smaller.hf.model.visual.blocks[0].mlp.fc1, torch.nn.Linear)
    reply = [3, 77, 200, 12]
    exact = model.prefill(picture(), INSTRUCTION).verify(reply).softmax(-1)
    close = smaller.prefill(picture(), INSTRUCTION).verify(reply)
    assert close.dtype == torch.float32 and close.shape == exact.shape
    assert (torch.minimum(exact, close.softmax(-1)).sum(-1) > share).all()


@pytest.mark.parametrize(("quantization", "bits", "error"), [("int8", 8, 0.02), ("4bit", 4.5, 0.15)])
def test_a_smaller_matrix_is_close_and_small(quantization, bits, error):
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 192, dtype=torch.bfloat16).requires_grad_(False)
    box = SimpleNamespace(hf=torch.nn.Sequential(linear), language=torch.nn.Sequential())
    quantize_on_cpu(box, quantization)
    x = torch.randn(2, 3, 256).bfloat16()
    difference = box.hf(x) - linear(x)
    assert box.hf(x).dtype == torch.bfloat16 and box.hf(x).shape == (2, 3, 192)
    assert difference.float().norm() < error * linear(x).float().norm()
    if quantization == "4bit":
        held = box.hf[0].levels.nbytes + box.hf[0].scales.nbytes
        assert held == 192 * 256 * bits / 8


def test_bfloat16_runs(model, model_directory, picture):
    half = load_model(ModelSettings(str(model_directory), dtype="bfloat16", threads=1))
    exact = model.prefill(picture(), INSTRUCTION).verify([1, 2, 3]).softmax(-1)
    logits = half.prefill(picture(), INSTRUCTION).verify([1, 2, 3])
    assert logits.dtype == torch.float32
    assert (torch.minimum(exact, logits.softmax(-1)).sum(-1) > 0.8).all()


def test_fingerprints_distinguish_models_and_tokenizers(model, tmp_path):
    def load(name, **options):
        return load_model(ModelSettings(str(make_tiny_model(tmp_path / name, **options))))

    twin = load("twin", seed=3, vocab_rows=272)
    padded = load("padded", seed=3, vocab_rows=320)
    noisy = load("noisy", seed=3, vocab_rows=272, noise=0.01)
    foreign = load("foreign", seed=3, vocab_rows=272, other_tokenizer=True)
    assert twin.fingerprint == model.fingerprint
    assert len({m.fingerprint for m in (model, padded, noisy)}) == 3
    assert padded.tokenizer_fingerprint == noisy.tokenizer_fingerprint == model.tokenizer_fingerprint
    assert foreign.tokenizer_fingerprint != model.tokenizer_fingerprint


def test_tokenizer_fingerprint_ignores_the_layout_of_the_file():
    value = json.loads(make_tokenizer().to_str())
    value["model"]["merges"] = [["a", "b"], ["c", "d"]]
    modern = json.dumps(value, indent=4, sort_keys=True)
    value["model"]["merges"] = ["a b", "c d"]
    assert tokenizer_fingerprint(json.dumps(value)) == tokenizer_fingerprint(modern)
    value["model"]["merges"] = ["c d", "a b"]
    assert tokenizer_fingerprint(json.dumps(value)) != tokenizer_fingerprint(modern)


def test_tokens_that_the_tokenizers_configuration_alone_adds(model, own_directory):
    """As in Qwen2-VL-2B-Instruct, whose tokenizer.json ends before the tokens of pictures."""
    path = own_directory / "tokenizer.json"
    value = json.loads(path.read_text())
    added = value["added_tokens"]
    value["added_tokens"] = added[:2]
    path.write_text(json.dumps(value))
    decoder = {str(token["id"]): {k: token[k] for k in token if k != "id"} for token in reversed(added)}
    edit_json(own_directory / "tokenizer_config.json", added_tokens_decoder=decoder)
    front = load_front(ModelSettings(str(own_directory)))
    text = model.template.render(INSTRUCTION, 3)
    ids = front.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == AutoTokenizer.from_pretrained(own_directory)(text)["input_ids"] == model.prompt_tokens(INSTRUCTION, 3)
    assert front.known_tokens == TOKENS
    for vocabulary in (front, Vocabulary.load(own_directory), Vocabulary.load(path)):
        assert vocabulary.tokenizer_fingerprint == model.tokenizer_fingerprint
    (own_directory / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match="tokenizer_config.json cannot be read as JSON"):
        load_front(ModelSettings(str(own_directory)))


def test_padding_and_truncation_that_a_trainer_saved_are_ignored(model, own_directory):
    path = own_directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_padding(length=200, direction="left")
    tokenizer.enable_truncation(10)
    tokenizer.save(str(path))
    for vocabulary in (load_front(ModelSettings(str(own_directory))).tokenizer, Vocabulary.load(path)):
        found = vocabulary.encode("a long instruction")
        assert getattr(found, "ids", found) == model.tokenizer.encode("a long instruction").ids


def test_no_instruction_contains_a_special_token_however_it_is_written(own_directory, picture):
    path = own_directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["[ACT]"])
    tokenizer.add_tokens(["robot"])
    tokenizer.save(str(path))
    model = load_model(ModelSettings(str(own_directory)))
    model.prefill(picture(), "go [act] robot")
    for instruction, history in (("go [ACT] now", []), ("go", [(picture(1), "stop [ACT]")])):
        for ask in (model.prefill, load_front(ModelSettings(str(own_directory))).prompt):
            with pytest.raises(PromptError, match=r"contains the model's marker '\[ACT\]'; remove it"):
                ask(picture(), instruction, history)


def test_what_generate_would_follow_and_a_reply_does_not_is_named(own_directory, caplog):
    file = own_directory / "generation_config.json"
    edit_json(file, do_sample=True, temperature=0.1, repetition_penalty=1.05, suppress_tokens=[3], num_beams=1)
    assert load_front(ModelSettings(str(own_directory))).token_options == TokenOptions(
        repetition_penalty=1.05, suppress_tokens=(3,)
    )
    assert not caplog.messages
    edit_json(file, num_beams=4, stop_strings=["."])
    load_model(ModelSettings(str(own_directory)))
    (message,) = caplog.messages
    assert "stop_strings, num_beams of generation_config.json is not followed" in message
    edit_json(file, repetition_penalty=-1)
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be used: Expected `float` > 0.*repe"):
        load_model(ModelSettings(str(own_directory)))


def test_tied_embeddings(own_directory):
    """As in Qwen2-VL-2B: the file holds no LM head, the embedding serves as one."""
    path = own_directory / "model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    edit_json(own_directory / "config.json", tie_word_embeddings=True)
    for quantization in ("none", "int8"):
        tied = load_model(ModelSettings(str(own_directory), quantization=quantization))
        assert torch.equal(tied.hf.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
        hidden = torch.randn(2, tied.hidden_size)
        normed = tied.hf.model.language_model.norm(hidden)
        expected = normed @ weights["model.embed_tokens.weight"].T
        tolerance = 1e-4 if quantization == "none" else 0.5
        with torch.inference_mode():
            logits = tied.head(hidden)
        torch.testing.assert_close(logits[:, :TOKENS], expected[:, :TOKENS], atol=tolerance, rtol=tolerance)


def test_sharded_weights(model, own_directory, picture):
    """As in Qwen2-VL-7B: several files and an index."""
    model.hf.save_pretrained(own_directory, max_shard_size="100KB")
    shards = sorted(own_directory.glob("model-*.safetensors"))
    assert len(shards) > 1
    (own_directory / "model.safetensors").unlink(missing_ok=True)
    sharded = load_model(ModelSettings(str(own_directory)))
    torch.testing.assert_close(
        sharded.prefill(picture(), INSTRUCTION).next_logits(), model.prefill(picture(), INSTRUCTION).next_logits()
    )
    shards[-1].unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(ModelSettings(str(own_directory)))


@pytest.mark.parametrize("name", [
    "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "exits/exits.safetensors",
])  # fmt: skip
def test_a_git_lfs_pointer_is_named_with_the_remedy(own_directory, name):
    (own_directory / name).parent.mkdir(exist_ok=True)
    (own_directory / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(ModelError, match=f"{name} is a Git LFS pointer.*run 'git lfs pull'"):
        load_model(ModelSettings(str(own_directory)))
