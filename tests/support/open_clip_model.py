"""OpenCLIP's CLIP in plain PyTorch, with the names of its states (src/open_clip/transformer.py)."""

from collections import OrderedDict

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(width, hidden), gelu=nn.GELU(), c_proj=nn.Linear(hidden, width)
            )
        )

    def forward(self, x, mask):
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        hidden, layers = config.intermediate_size, config.num_hidden_layers
        self.resblocks = nn.ModuleList([Block(width, heads, hidden) for _ in range(layers)])

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, config, joint):
        super().__init__()
        d, patch = config.hidden_size, config.patch_size
        self.class_embedding = nn.Parameter(torch.randn(d))
        self.positional_embedding = nn.Parameter(
            torch.randn((config.image_size // patch) ** 2 + 1, d)
        )
        self.proj = nn.Parameter(torch.randn(d, joint))
        self.conv1 = nn.Conv2d(3, d, patch, stride=patch, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(d), nn.LayerNorm(d)
        self.transformer = Transformer(config)

    def forward(self, pixels):
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        token = self.class_embedding.expand(len(pixels), 1, -1)
        x = torch.cat([token, patches], 1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenCLIP(nn.Module):
    """The model of transformers' CLIPConfig; it takes tokens whose largest id ends the text."""

    def __init__(self, config):
        super().__init__()
        text, joint = config.text_config, config.projection_dim
        d, length = text.hidden_size, text.max_position_embeddings
        self.positional_embedding = nn.Parameter(torch.randn(length, d))
        self.text_projection = nn.Parameter(torch.randn(d, joint))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.visual = Visual(config.vision_config, joint)
        self.transformer = Transformer(text)
        self.token_embedding = nn.Embedding(text.vocab_size, d)
        self.ln_final = nn.LayerNorm(d)
        self.register_buffer("attn_mask", torch.full((length, length), -torch.inf).triu(1))

    def encode_image(self, pixels):
        return nn.functional.normalize(self.visual(pixels), dim=-1)

    def encode_text(self, tokens):
        count = tokens.shape[1]
        x = self.token_embedding(tokens) + self.positional_embedding[:count]
        x = self.ln_final(self.transformer(x, self.attn_mask[:count, :count]))
        pooled = x[torch.arange(len(x)), tokens.argmax(-1)]
        return nn.functional.normalize(pooled @ self.text_projection, dim=-1)
