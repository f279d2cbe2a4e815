"""Caches of steps in PyTorch by their definitions, and what caches of ours have computed."""

import contextlib
from typing import Any
from unittest import mock

import diffusers
import jax
import numpy as np
import torch

from diffusax.pipelines.run import sample


def computed_rows(pipe: Any, **call: Any) -> np.ndarray:
    """Which lanes computed all at each row of a call, n m, by what their memory keeps of it."""
    found: list[np.ndarray] = []
    run = sample._denoise

    def watched(model: Any, state: Any, plan: Any, start: int, stop: int, memory: Any) -> Any:
        # The program takes the memory of its argument.
        before = [np.array(leaf) for leaf in jax.tree.leaves(memory.values)]
        calls = np.array(memory.calls)
        state, memory = run(model, state, plan, start, stop, memory)
        after = [np.array(leaf) for leaf in jax.tree.leaves(memory.values)]
        changed = [(x != y).reshape(len(x), -1).any(1) for x, y in zip(before, after)]
        # What is computed first of all may be zero.
        begun = (calls == 0) & (np.array(memory.calls) == 1)
        found.append(np.logical_or.reduce(changed) | begun)
        return state, memory

    def each_row(pipe: Any, row: int, timestep: float, tensors: Any) -> Any:
        return tensors

    with mock.patch.object(sample, "_denoise", watched):
        pipe(**call, callback_on_step_end=each_row)
    return np.stack(found)


class FirstBlockReference(contextlib.ExitStack):
    """First Block Cache by its definition, in PyTorch; it computes all blocks and then forgets.

    A transformer of one image without guidance has its tokens after the first block, and what comes
    after the last block is given those of the image, at the end.
    """

    def __init__(self, transformer: Any, first: str, last: str, threshold: float):
        super().__init__()
        self.threshold, self.decisions = threshold, list[bool]()
        self.residual = self.tail = self.head = None
        for handle in (
            transformer.get_submodule(first).register_forward_hook(self._after, with_kwargs=True),
            transformer.get_submodule(last).register_forward_pre_hook(
                self._before, with_kwargs=True
            ),
        ):
            self.callback(handle.remove)

    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        before = kwargs.get("hidden_states", args[0] if args else None)
        self.head = output[1] if isinstance(output, tuple) else output
        residual = self.head - before
        change = np.inf
        if self.residual is not None:
            # Without the tokens of a text that stand before the image's in the first step alone.
            n = min(residual.shape[1], self.residual.shape[1])
            own, old = residual[:, -n:], self.residual[:, -n:]
            change = float((own - old).abs().mean() / old.abs().mean())
        self.decisions.append(change > self.threshold)
        if self.decisions[-1]:
            self.residual = residual

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        x, head = args[0], self.head[:, -args[0].shape[1] :]
        if self.decisions[-1]:
            self.tail = x - head
        return (head + self.tail, *args[1:]), kwargs


class DeepReference(contextlib.AbstractContextManager):
    """DeepCache by its definition on diffusers' UNet: the calls of a run in order.

    interval: all is computed at every so many calls. branch: the skip connection below which else
    nothing is.
    """

    def __init__(self, unet: Any, interval: int, branch: int):
        self.unet, self.interval, self.branch = unet, interval, branch
        self.calls, self.deep = 0, None

    def __enter__(self) -> "DeepReference":
        self.unet.forward = self.forward
        return self

    def __exit__(self, *_: Any) -> None:
        del self.unet.forward

    def forward(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any, **given: Any
    ) -> tuple[Any]:
        unet, context = self.unet, encoder_hidden_states
        times = torch.as_tensor(timestep).expand(sample.shape[0])
        emb = unet.time_embedding(unet.time_proj(times).to(sample.dtype))
        added = given.get("added_cond_kwargs")
        if unet.config.addition_embed_type == "text_time":
            ids = unet.add_time_proj(added["time_ids"].flatten()).reshape(len(sample), -1)
            emb = emb + unet.add_embedding(torch.cat([added["text_embeds"], ids], dim=-1))
        down, up = _layers(unet.down_blocks, "downsamplers"), _layers(unet.up_blocks, "upsamplers")
        computes = self.calls % self.interval == 0
        x = unet.conv_in(sample)
        skips = [x]
        for layer in down if computes else down[: self.branch]:
            x = layer(x, emb, context)
            skips.append(x)
        if computes:
            x = unet.mid_block(x, emb, encoder_hidden_states=context)
        if residuals := given.get("down_block_additional_residuals"):
            skips = [skip + r for skip, r in zip(skips, residuals)]
            x = x + given["mid_block_additional_residual"] if computes else x
        # A layer that upsamples is one with the resnet before it.
        joined, ups = [], iter(up)
        for layer in ups:
            joined.append([layer] if layer.joins else [*joined.pop(), layer])
        for layers in joined if computes else joined[-self.branch - 1 :]:
            if len(skips) == self.branch + 1:
                x = self.deep = x if computes else self.deep
            x = torch.cat([x, skips.pop()], dim=1)
            for layer in layers:
                x = layer(x, emb, context)
        self.calls += 1
        return (unet.conv_out(unet.conv_act(unet.conv_norm_out(x))),)


class _Layer:
    """A resnet with its transformer, or what changes the size of maps."""

    def __init__(self, resnet: Any, attention: Any = None, *, joins: bool):
        self.resnet, self.attention, self.joins = resnet, attention, joins

    def __call__(self, x: Any, emb: Any, context: Any) -> Any:
        if not self.joins:
            return self.resnet(x)
        x = self.resnet(x, emb)
        if self.attention is None:
            return x
        return self.attention(x, encoder_hidden_states=context, return_dict=False)[0]


def _layers(blocks: Any, sampler: str) -> list[_Layer]:
    found = []
    for block in blocks:
        attentions = getattr(block, "attentions", [None] * len(block.resnets))
        found += [_Layer(*pair, joins=True) for pair in zip(block.resnets, attentions)]
        found += [_Layer(one, joins=False) for one in getattr(block, sampler) or []]
    return found


def diffusers_decisions(monkeypatch: Any) -> list[Any]:
    """The decisions of FirstBlockCache in diffusers from now on, in the order of its calls."""
    found: list[Any] = []
    hook = diffusers.hooks.first_block_cache.FBCHeadBlockHook
    decide = hook._should_compute_remaining_blocks

    def note(self: Any, residual: Any) -> Any:
        found.append(decide(self, residual))
        return found[-1]

    monkeypatch.setattr(hook, "_should_compute_remaining_blocks", note)
    return found
