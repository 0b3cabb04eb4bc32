"""Load a model so that its PLE table never touches the GPU: :func:`load`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from torch import nn

from pleviz.homes import drop_own_forward, offload
from pleviz.homes.embedding import HostEmbedding
from pleviz.homes.shard import checkpoint_dir, find_in_checkpoint
from pleviz.specs import spec_of
from pleviz.table import TABLE_NAME, compute_device, find_table

QUANTIZATIONS = ("nf4", "int8")


def load(
    model_id_or_path: str | Path,
    *,
    home: str = "auto",
    quantization: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    towers: bool = True,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """Load a checkpoint with its table in ``home``; at no time is the table on the GPU.

    transformers places the table on the CPU while it loads (its supported ``device_map``); then
    accelerate's hook, which would copy the whole table at every step, gives way to the home.

    Args:
        model_id_or_path: a folder with safetensors weights, or a name on the Hugging Face Hub.
        home: see :func:`pleviz.offload`. ``"gpu"`` loads the ordinary way.
        quantization: ``"nf4"`` (4-bit, double-quantised) or ``"int8"``, through bitsandbytes.
        device: where to compute; the first CUDA device if there is one, otherwise the CPU.
        towers: ``False`` leaves the vision and audio weights of a multimodal checkpoint out.
        kwargs: passed on to ``from_pretrained`` (``revision``, ``attn_implementation`` …).

    Returns:
        ``(model, processor or tokenizer)``; the second is ``None``, with a warning, where the
        checkpoint has none.

    Raises:
        ValueError: unknown quantisation or home, or weights that do not fill the model.
        NoTableError: the model has no PLE table.
        PermissionError: the repository is gated; says how to get access.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(
            f"unknown quantization {quantization!r}; choose None, {', '.join(QUANTIZATIONS)}"
        )
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    name = str(model_id_or_path)
    config = _config(name, kwargs)
    spec_of(config)  # raises NoTableError
    cls, config, key_mapping = model_class(config, towers)
    table_on = device if home == "gpu" else torch.device("cpu")
    placement = device_map(cls, config, device, table_on)
    if quantization is not None and table_on != device:
        # A weight is on the GPU in 16 bit for a moment before it is quantised. With the token
        # embedding, which stays in 16 bit, arriving last, those moments are below the floor.
        late = ("embed_tokens", "lm_head")
        placement |= {name: table_on for name in placement if name.rpartition(".")[2] in late}
    model, report = cls.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        device_map=placement,
        quantization_config=quantization_config(quantization, dtype, offloads=table_on != device),
        key_mapping=key_mapping,
        output_loading_info=True,
        **kwargs,
    )
    _refuse_holes(model, report, name)
    take_off_hooks(model, device)
    _settle(model.eval(), home, name, dtype)
    return model, _processor(
        name, multimodal=key_mapping is None and hasattr(config, "text_config")
    )


def device_map(
    cls: type, config: Any, device: torch.device | str, table: torch.device | str
) -> dict[str, torch.device | str]:
    """Place every module of ``cls(config)`` on ``device`` but the PLE table, which goes to ``table``.

    Each sibling on the way to the table is listed by its full name: a key for the root, or for a
    prefix such as ``model.embed_tokens``, would catch the table too.
    """
    if str(device) == str(table):
        return {"": device}
    with torch.device("meta"):
        skeleton = cls(config)
    places: dict[str, torch.device | str] = {}

    def place(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            path = f"{prefix}{child_name}"
            if child_name == TABLE_NAME:
                places[path] = table
            elif any(n.rpartition(".")[2] == TABLE_NAME for n, _ in child.named_modules()):
                place(child, f"{path}.")
            else:
                places[path] = device
        for tensor_name, _ in module.named_parameters(recurse=False):
            places[f"{prefix}{tensor_name}"] = device

    place(skeleton, "")
    return places


def _config(name: str, kwargs: dict[str, Any]) -> Any:
    from huggingface_hub.errors import GatedRepoError
    from transformers import AutoConfig

    hub = {
        k: kwargs[k] for k in ("revision", "token", "cache_dir", "local_files_only") if k in kwargs
    }
    try:
        return AutoConfig.from_pretrained(name, **hub)
    except OSError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, GatedRepoError):
            cause = cause.__cause__ or cause.__context__
        if cause is None and "gated" not in str(error):
            raise
        raise PermissionError(
            f"{name} is gated: accept its licence at https://huggingface.co/{name} while signed in, "
            "make a read token at https://huggingface.co/settings/tokens, then run `hf auth login` "
            "(or set HF_TOKEN) and try again."
        ) from None


def model_class(config: Any, towers: bool) -> tuple[type, Any, dict[str, str] | None]:
    """The class to load with, its config, and how checkpoint keys map when towers are left out."""
    from transformers import AutoModelForCausalLM

    if hasattr(config, "text_config") and not towers:
        text = config.text_config
        text.tie_word_embeddings = config.tie_word_embeddings
        return (
            AutoModelForCausalLM._model_mapping[type(text)],
            text,
            {r"^model\.language_model": "model"},
        )
    return AutoModelForCausalLM._model_mapping[type(config)], config, None


def quantization_config(quantization: str | None, dtype: torch.dtype, *, offloads: bool) -> Any:
    """The config of bitsandbytes for ``"nf4"`` or ``"int8"``; ``None`` without quantisation.

    Args:
        quantization: see :func:`load`.
        dtype: what 4-bit weights are computed in.
        offloads: whether anything is placed on the CPU, which bitsandbytes must be told.
    """
    if quantization is None:
        return None
    from transformers import BitsAndBytesConfig

    # bitsandbytes refuses any module on the CPU without this flag, although the table stays as it is
    common = {"llm_int8_enable_fp32_cpu_offload": offloads}
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, **common)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        **common,
    )


def _refuse_holes(model: nn.Module, report: Any, name: str) -> None:
    """A tensor the checkpoint lacks is filled with random numbers: never go on with that."""
    random = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if random:
        raise ValueError(
            f"{len(random)} weights of {type(model).__name__} are not in {name}, or not in the model's "
            f"shape (first: {min(random)}); they would be random. Is the checkpoint complete, and of "
            "this model class?"
        )


def take_off_hooks(model: nn.Module, device: torch.device) -> None:
    """Everything but the table goes to one device: accelerate's hooks are pure cost there."""
    remove_hook_from_module(model, recurse=True)
    table = find_table(model).module
    model.tie_weights()  # hooks replace parameters: what is tied must be one tensor before it moves
    for parameter in model.parameters():
        if parameter is not table.weight and parameter.device != device:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        drop_own_forward(module)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    if table.weight.is_meta:
        raise RuntimeError("the table has no values after loading; report this with your versions")
    model.__dict__.pop("hf_device_map", None)


def _settle(model: nn.Module, home: str, name: str, dtype: torch.dtype) -> None:
    """Give the table its home. It was read from the checkpoint just now, so ``file`` need not verify."""
    folder = checkpoint_dir(name)
    if (
        home == "auto"
        and folder is not None
        and compute_device(find_table(model).owner).type == "cuda"
    ):
        try:
            usable = find_in_checkpoint(folder).dtype == dtype
        except (FileNotFoundError, ValueError):
            usable = False
        home = "file" if usable else "auto"
    offload(model, home, checkpoint=folder, verify=False)
    module = find_table(model).module
    if isinstance(module, HostEmbedding):
        module._home.joins_model = True  # restored, it goes where it would have been loaded


def _processor(name: str, *, multimodal: bool) -> Any:
    from transformers import AutoProcessor, AutoTokenizer

    # for a folder without tokenizer files transformers makes up an empty tokenizer
    folder = Path(name)
    found = not folder.is_dir() or any(folder.glob("tokenizer*")) or any(folder.glob("*.model"))
    for auto in (AutoProcessor, AutoTokenizer) if multimodal else (AutoTokenizer,):
        try:
            if found:
                return auto.from_pretrained(name)
        except (OSError, ValueError, ImportError, KeyError):
            continue
    warnings.warn(
        f"{name} has no tokenizer that could be loaded; returning None for it", stacklevel=3
    )
    return None
