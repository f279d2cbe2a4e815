"""Processors for attentions of diffusers that keep the map, and may change it; forward hooks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

Edit = Callable[[torch.Tensor], torch.Tensor]
"""A function of a map, b heads queries keys."""


class Processor:
    """Has the map that an attention computed last, b heads queries keys, after an edit of it."""

    def __init__(self, edit: Edit | None = None):
        self.edit, self.maps = edit, list[torch.Tensor]()

    def read(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends by the map. q, k, v: b tokens heads d -> b tokens (heads d)."""
        scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        probs = scores.softmax(-1)
        self.maps.append(probs.detach())
        probs = probs if self.edit is None else self.edit(probs)
        return torch.einsum("bhts,bshd->bthd", probs, v).flatten(2)


class CrossProcessor(Processor):
    """For the attentions of UNets, `attn.set_processor(CrossProcessor())`."""

    def __call__(self, attn: Any, x: Any, encoder_hidden_states: Any = None, **_: Any) -> Any:
        context = x if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.to_q(x), attn.to_k(context), attn.to_v(context)
        q, k, v = (y.unflatten(-1, (attn.heads, -1)) for y in (q, k, v))
        return attn.to_out[0](self.read(q, k, v))


class JointProcessor(Processor):
    """For the attentions of FLUX.1's transformer, of both kinds."""

    def __call__(
        self,
        attn: Any,
        x: Any,
        context: Any = None,
        attention_mask: None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        q, k, v = (
            y.unflatten(-1, (attn.heads, -1)) for y in (attn.to_q(x), attn.to_k(x), attn.to_v(x))
        )
        q, k = attn.norm_q(q), attn.norm_k(k)
        if context is not None:
            own = attn.add_q_proj(context), attn.add_k_proj(context), attn.add_v_proj(context)
            own_q, own_k, own_v = (y.unflatten(-1, (attn.heads, -1)) for y in own)
            q = torch.cat([attn.norm_added_q(own_q), q], 1)
            k = torch.cat([attn.norm_added_k(own_k), k], 1)
            v = torch.cat([own_v, v], 1)
        q, k = (apply_rotary_emb(y, image_rotary_emb, sequence_dim=1) for y in (q, k))
        y = self.read(q, k, v)
        if context is None:
            return y
        s = context.shape[1]
        return attn.to_out[0](y[:, s:]), attn.to_add_out(y[:, :s])


@contextlib.contextmanager
def processed(attention: Any, processor: Processor) -> Iterator[Processor]:
    """Gives an attention another processor for a while."""
    before = attention.processor
    attention.set_processor(processor)
    try:
        yield processor
    finally:
        attention.set_processor(before)


@contextlib.contextmanager
def outputs(module: Any) -> Iterator[list[Any]]:
    """The outputs of a module, one for each of its calls."""
    found = list[Any]()
    handle = module.register_forward_hook(lambda module, given, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()
