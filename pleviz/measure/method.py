"""In words, what the numbers of a record count and how they were taken."""

from __future__ import annotations

from pleviz.measure.plan import (
    DECODE_PROMPT,
    PREFILLS,
    REFERENCE_PROMPT,
    REFERENCE_STEPS,
    SEGMENTS,
    Options,
)

_MEMORY = {
    "rows": "one process per row; every row loads the same checkpoint with from_pretrained",
    "memory": "growth of torch's memory_allocated over its value before loading, with the CUDA context "
    "and the BLAS workspace made already; where there is no accelerator, growth of the process' RSS "
    "(memory_source says which)",
    "resident_bytes": "after loading, garbage collected and cache emptied",
    "load_peak_bytes": "most while loading",
    "predicted_resident_bytes": "pleviz.budget for the same shapes, home and precision",
}
_HOMES = {
    "home device_map": "from_pretrained(device_map={..., table: 'cpu'}), nothing changed: accelerate's "
    "hook copies the whole table to the GPU in every forward pass",
    "home workaround": "the popular patched forward: ids to the CPU, pageable gather, rows copied up",
}


def method_notes(options: Options) -> dict[str, str]:
    """The ``method`` of the record."""
    notes = dict(_MEMORY)
    weights = "random, of one seed" if options.checkpoint is None else "a checkpoint's"
    notes["weights"] = f"{weights}; memory and speed do not depend on their values"
    if {"device_map", "workaround"} & set(options.homes):
        notes |= {k: v for k, v in _HOMES.items() if k.split()[1] in options.homes}
    if options.only_memory:
        return notes
    tok_s = (
        "tokens per second, all sequences of the batch together; greedy decoding from a "
        f"{DECODE_PROMPT}-token prompt after warm-up, median of {SEGMENTS} stretches, the device waited "
        "for at their ends; tokens are chosen among the ids that have a row in the table"
    )
    if options.compiled:
        return notes | {
            "decode": f"{tok_s}; torch.compile (CUDA: mode='reduce-overhead') of the whole step with "
            "transformers' StaticCache, every layer as long as prompt and steps (shorter than the sliding "
            "window), after an eager prefill; in one graph (fullgraph) or with breaks",
            "compile_s": "until the first steps had run, of all rows at the same time on shared "
            "processors; only the decoding was timed alone",
            "ratio_to_gpu": "of tok_s",
        }
    return notes | {
        "prefill_s": f"one forward pass, batch 1, filling a dynamic cache, logits_to_keep=1; median of "
        f"{PREFILLS[0]} to {PREFILLS[1]} after one warm-up",
        "decode": f"{tok_s}; eager, dynamic cache",
        "peak_prefill_bytes": "most during the warm-up prefill, the model included",
        "predicted_peak_prefill_bytes": "pleviz.budget's estimate for the same prompt, without the BLAS "
        "workspace",
        "peak_decode_bytes": "most during one decode step of the first batch size, model and cache included",
        "parity": f"logits of all positions of a {REFERENCE_PROMPT}-token prompt, bit by bit, and up to "
        f"{REFERENCE_STEPS} greedy tokens, against the gpu row; that the table has influence on the "
        "logits was checked",
        "ratio_to_gpu": "of prefill_s and tok_s",
    }
