"""What must be equal at both ends of a hand-over, because it decides the bytes of a block."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import vllm

# Files of weights, and how much of each is read if nothing says where its tensors are.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES, _SAMPLE_BYTES = 4096, 64
# What differs from host to host, not from model to model.
_LOCAL_NAMES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def weights_of(model: Any) -> str:
    """Which weights a model has: a digest of samples of its files.

    Without files, it is the name of the model, with the commit or revision of its repository.
    """
    path, digest = Path(model.model), hashlib.sha256()
    files = [path] if path.is_file() else sorted(
        one for kind in _WEIGHTS for one in path.glob(kind))
    if not files:
        commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
        return f"{model.model_weights or model.model} {commit}"
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            for offset in _offsets_of(file, opened, digest):
                opened.seek(offset)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _offsets_of(file: Path, opened: Any, digest: Any) -> Iterable[int]:
    """Where samples are: at the start of each tensor, or in equal steps."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES))
    length = int.from_bytes(opened.read(8), "little")
    header = opened.read(length)
    digest.update(header)
    return [8 + length + tensor["data_offsets"][0]
            for name, tensor in json.loads(header).items() if name != "__metadata__"]


def facts_of(vllm_config: Any, kv_cache_config: Any, dtype: str) -> str:
    """All that decides what the bytes of a block mean. It must be equal at both ends."""
    layers = kv_cache_config.kv_cache_tensors[0].layers
    layer = vllm_config.compilation_config.static_forward_context[layers[0]]
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return json.dumps({
        "vllm": getattr(vllm, "__version__", ""), "isa": getattr(layer, "isa", None),
        "backend": layer.get_attn_backend().get_name(), "dtype": dtype,
        "layout": kv_cache_config.kv_cache_layout, "layers": layers,
        "spec": repr(kv_cache_config.kv_cache_groups[0].kv_cache_spec),
        "tp_size": parallel.tensor_parallel_size, "tp_rank": parallel.rank,
        "model": {name: value for name, value in model.hf_text_config.to_dict().items()
                  if name not in _LOCAL_NAMES},
        "weights": weights_of(model), "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
    }, sort_keys=True, default=str)
