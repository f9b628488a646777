"""A whole server on a device, beside PEFT in float64."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loraplex import Client, Generation
from support.dense import greedy, make_dense
from support.processes import loraplex
from support.world import make_world

NUM_TOKENS = 24
PROMPTS = tuple(tuple((7 * number + place) % 250 for place in range(3 + 5 * number)) for number in range(4))
LONG = {"max_tokens": 300, "ignore_eos": True}


def check_server(device: str, root: Path) -> None:
    """Texts of the base and of more adapters than slots, all at once, with drafts and without, are PEFT's. A stream
    that runs when the server is told to end comes to its end."""
    world = make_world(root, 6, hidden_size=256, num_layers=4)
    base = make_dense(AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float64))
    want = {("", prompt): greedy(base, prompt, NUM_TOKENS) for prompt in PROMPTS}
    for name in world.names:
        peft = PeftModel.from_pretrained(base, world.adapters / name).double().eval()
        want |= {(name, prompt): greedy(peft, prompt, NUM_TOKENS) for prompt in PROMPTS}
        base = peft.unload()
    options = ("--device", device, "--dtype", "float32", "--adapter-slots", "4", "--kv-memory", "256MiB", "--port", "0")
    command = ("serve", str(world.model), "--adapters", str(world.adapters), *options)
    with loraplex(*command, timeout_s=150) as running, Client(running.address) as client:
        for kind in ("off", "prompt_lookup"):
            asked = [{"token_ids": prompt, "adapter_id": name or None, "speculation": kind} for name, prompt in want]
            made = client.generate_many(asked, max_tokens=NUM_TOKENS, ignore_eos=True)  # type: ignore[arg-type]
            for one, (name, prompt) in zip(made, want, strict=True):
                assert isinstance(one, Generation), f"{name}: {one}"
                assert list(one.completions[0].token_ids) == want[name, prompt], (kind, name, prompt)
        stream = client.stream("a", **LONG)  # type: ignore[arg-type]
        chunks = [next(stream)]
        ending = threading.Thread(target=running.end, args=(signal.SIGTERM, 60))
        ending.start()
        chunks += stream
        ending.join()
    assert sum(len(chunk.token_ids) for chunk in chunks) == LONG["max_tokens"]
    assert running.process.returncode == 0, running.output
