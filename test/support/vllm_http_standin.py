# SPDX-License-Identifier: Apache-2.0
"""What the product uses of a vLLM server, over a model of transformers, and misbehaving when it is told to.

``faults`` has a name for each next request to generate, see FAULTS. Attributes stand for the flags it was started with.
"""

from __future__ import annotations

import base64
import io
import json
import random
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import vllm_standin
from PIL import Image

from dsd_ros.vlm.loading import ModelSettings, load_front

FAULTS = (
    "cached", "not-json", "short", "null", "garbage", "tie", "nan", "padding", "400", "429", "500", "forgets", "html",
    "cut", "silent", "slow", "dies", "other", "huge",
)  # fmt: skip
GENERATE = "/inference/v1/generate"


class VllmServer:
    """`vllm serve` at ``url``."""

    def __init__(self, directory: str) -> None:
        self.scale_out = self.details = self.coupled = self.normalises = True
        self.max_logprobs, self.max_model_len, self.key, self.name = 20, 0, "", "target"
        self.version: Any = {"version": "0.32.0"}
        self.alive = True
        self.faults: deque[str] = deque()
        self.free = threading.Event()  # ends what is slow
        self.requests = self.without_cache = self.pixels_sent = 0
        args = vllm_standin.AsyncEngineArgs(directory, "generate", {}, True, "float32", 0)
        self.llm = vllm_standin.AsyncLLM(args)
        self.front = load_front(ModelSettings(directory))
        self._lock = threading.Lock()
        self._pictures: dict[str, Any] = {}
        self._chance = random.Random(0)
        handler = type("Handler", (_Handler,), {"vllm": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.free.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and content of an answer; None: the connection is cut."""
        if path == "/health":
            return 200, b""
        if path == "/version":
            return 200, self.version
        if path == "/v1/models":
            most = self.max_model_len or self.front.max_length
            return 200, {"object": "list", "data": [{"id": self.name, "object": "model", "max_model_len": most}]}
        if path == "/tokenize":
            return 200, {"tokens": self.front.tokenizer.encode(body["prompt"], add_special_tokens=False).ids}
        if not self.scale_out:
            return failed(
                403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable."
            )
        if path == "/v1/chat/completions/render":
            return 200, self._rendered(body)
        assert path == GENERATE, path
        self.requests += 1
        fault = self.faults.popleft() if self.faults else ""
        assert fault in ("", *FAULTS), fault
        if fault == "slow":
            self.free.wait(20)
        if fault == "silent":
            time.sleep(20)
        if fault == "dies":
            self.alive = False
        if fault in ("cut", "dies"):
            return 0, None
        if fault == "not-json":
            if "prompt_logprobs" in body["sampling_params"]:
                return failed(400, "Out of range float values are not JSON compliant: nan")
            fault = ""
        if fault.isdigit():
            return failed(int(fault), "not now\nsecond line")
        if fault == "html":
            return 200, b"<html>welcome</html>"
        if fault == "huge":
            return 200, b" " * (65 << 20)
        with self._lock:
            return self._generated(body, fault)

    def _rendered(self, body: Any) -> Any:
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        image = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
        assert self.front.images is not None
        pixels, grid = self.front.images(image)
        pixels = self.front.images.raw(pixels) if self.normalises else pixels
        item = {
            "pixel_values": {"data": packed(pixels), "field": ["flat", {}]},
            "image_grid_thw": {"data": packed(grid[0]), "field": ["batched", {}]},
        }
        return {"features": {"kwargs_data": {"image": [base64.b64encode(msgspec.msgpack.encode(item)).decode()]}}}

    def _pixels(self, features: Any, fault: str) -> list[Any] | None:
        """The pictures of a request; None when it names one that is not there."""
        if fault == "forgets":
            self._pictures.clear()
        found = []
        for name, data in zip(features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True):
            if data is not None:
                self.pixels_sent += 1
                item = msgspec.msgpack.decode(base64.b64decode(data))
                assert item["pixel_values"]["field"][0] == "flat" and item["image_grid_thw"]["field"][0] == "batched"
                pixels, grid = unpacked(item["pixel_values"]["data"]), unpacked(item["image_grid_thw"]["data"])[None]
                if self.normalises:
                    assert pixels.dtype == torch.uint8
                    pixels = self._normalised(pixels)
                self._pictures[name] = {"pixel_values": pixels, "image_grid_thw": grid}
            if name not in self._pictures:
                return None
            found.append(self._pictures[name])
        return found

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        processor = self.front.images._processor
        mean, std = (torch.tensor(numbers)[:, None] for numbers in (processor.image_mean, processor.image_std))
        return ((pixels.float().unflatten(1, (3, -1)) * processor.rescale_factor - mean) / std).flatten(1)

    def _generated(self, body: Any, fault: str) -> tuple[int, Any]:
        tokens, sampling, features = body["token_ids"], body["sampling_params"], body.get("features")
        if max(tokens) >= self.front.vocab_size:
            return failed(400, f"Token id {max(tokens)} is out of vocabulary")
        named = sampling.get("prompt_logprobs")
        if max(named or 0, sampling["logprobs"]) > self.max_logprobs:
            return failed(400, f"Requested logprobs of {named}, which is greater than max allowed: {self.max_logprobs}")
        pictures = self._pixels(features, fault) if features else []
        if pictures is None:
            return failed(500, "Internal server error")
        places = [SimpleNamespace(**place) for place in features["mm_placeholders"]["image"]] if features else []
        logits = self.llm._logits([min(token, self.llm._model.vocab_size - 1) for token in tokens], pictures, places)
        logits = logits.clone()  # not of inference mode
        if fault == "nan":
            logits = torch.full_like(logits, torch.nan)
        if fault == "padding":
            logits[:, self.front.known_tokens] = 1e4
        if fault == "tie":
            logits[:-1].scatter_(1, logits[:-1].topk(2).indices[:, 1:], logits[:-1].amax(-1, keepdim=True))
        cached = self._cached(tokens, body["cache_salt"], sampling, fault)
        usage: dict[str, Any] = {"prompt_tokens": len(tokens) + (fault == "other"), "completion_tokens": 1}
        if self.details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        content = {"choices": [self._choice(logits[-1], sampling)], "usage": usage}
        if named is not None:
            content["prompt_logprobs"] = self._rows(tokens, logits, named, cached, fault)
        return 200, content

    def _cached(self, tokens: list[int], salt: str, sampling: Any, fault: str) -> int:
        skip = sampling.get("skip_reading_prefix_cache", "prompt_logprobs" in sampling)
        self.without_cache += bool(skip)
        request = {"prompt_token_ids": tokens, "cache_salt": salt}
        found = self.llm._hits(request, SimpleNamespace(skip_reading_prefix_cache=skip), "")
        return len(tokens) - 1 if fault == "cached" and not skip else found

    def _choice(self, logits: torch.Tensor, sampling: Any) -> Any:
        """What is generated; logprobs are those before any logits processor."""
        raw = torch.log_softmax(logits, -1)
        wish = (sampling.get("extra_args") or {}).get("dsd")
        if wish and self.coupled:
            from dsd_ros.cloud.vllm.worker import CoupledChoice

            plugin = CoupledChoice(None, torch.device("cpu"), False)
            params = SimpleNamespace(extra_args=json.loads(json.dumps({"dsd": wish})))
            CoupledChoice.validate_params(params)
            other = SimpleNamespace(extra_args=None)
            plugin.update_state(
                SimpleNamespace(added=[(0, other, None, []), (1, params, None, [])], removed=[], moved=[])
            )
            batch = torch.stack([logits, logits])
            both = plugin.apply(batch.clone())
            assert both[0].nan_to_num().equal(batch[0].nan_to_num())
            logits = both[1]
        bias = torch.zeros_like(logits)
        for token, value in (sampling.get("logit_bias") or {}).items():
            bias[int(token)] = max(-100.0, value)
        chosen = int((logits + bias).argmax())
        tops = [chosen, *raw.topk(sampling["logprobs"]).indices.tolist()]
        entries = [{"token_id": token, "logprob": clamped(raw[token])} for token in tops]
        return {"token_ids": [chosen], "logprobs": {"content": [entries[0] | {"top_logprobs": entries}]}}

    def _rows(self, tokens: list[int], logits: torch.Tensor, named: int, cached: int, fault: str) -> list[Any]:
        rows: list[Any] = [None]
        raw = torch.log_softmax(logits, -1)
        for place, token in enumerate(tokens[1:]):
            top = raw[place].topk(named).indices.tolist()
            if place < cached or fault == "garbage":  # memory that nobody has written
                names = [self._chance.randrange(-(1 << 31), 1 << 31) for _ in range(named)]
                names += [token] * (fault == "garbage")
                rows.append({str(name): {"logprob": self._chance.uniform(-1, 2), "rank": 1} for name in names})
                continue
            if fault == "tie":
                top.reverse()
            found = {str(known): {"logprob": clamped(raw[place, known]), "rank": n + 1} for n, known in enumerate(top)}
            rows.append(found | {str(token): {"logprob": clamped(raw[place, token])}})
        if fault == "short":
            return rows[: len(rows) // 2]
        return [None] * len(rows) if fault == "null" else rows


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    vllm: VllmServer

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: Any) -> None:
        vllm = self.vllm
        if not vllm.alive:
            self.close_connection = True
            return
        if vllm.key and self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {vllm.key}":
            status, content = 401, {"error": "Unauthorized"}
        else:
            status, content = vllm.answer(self.path, body)
        if content is None:
            self.close_connection = True
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def failed(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "Error", "code": status}}


def clamped(logprob: torch.Tensor) -> float:
    return max(float(logprob), -9999.0) if not torch.isnan(logprob) else -9999.0


def packed(tensor: torch.Tensor) -> Any:
    data = msgspec.msgpack.Ext(3, tensor.contiguous().numpy().tobytes())
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


def unpacked(data: Any) -> torch.Tensor:
    dtype, shape, content = data
    return torch.from_numpy(np.frombuffer(content.data, dtype=dtype).reshape(shape).copy())
