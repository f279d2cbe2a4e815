"""Trains textual inversion (Gal et al. 2022): the embeddings of a new word, and nothing else.

The loss is that of text to image with all networks frozen, on captions that name the word, as in
diffusers' examples/textual_inversion. The trained parameters are the word's rows, n d for each text
encoder; all other rows of the tables stay as they are because they are no parameters of the loss.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from msgspec import Meta
from PIL import Image

from diffusax.checkpoints.embeddings import FILE, write_embedding
from diffusax.models.encoders.clip import CLIPTextModel
from diffusax.models.encoders.token_table import WORDS, EncoderWithWords
from diffusax.models.network import Network, Params
from diffusax.pipelines import DiffusionPipeline
from diffusax.runtime.devices.mesh import to_host
from diffusax.text.tokenizer import CLIPTokenizer
from diffusax.text.words import taken_name, token_names
from diffusax.training.config import DenoiserConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.examples import TEMPLATES, choose_caption
from diffusax.training.data.options import CaptionedDataConfig
from diffusax.training.data.pairs import Repeated
from diffusax.training.optimizers import OptimizerConfig
from diffusax.training.options import require_options
from diffusax.training.recipes.base_model import BaseModel
from diffusax.training.recipes.denoiser import Denoiser
from diffusax.training.recipes.row_examples import caption_example
from diffusax.training.step.step import Batch

_USAGE = """```python
import diffusax

pipe = diffusax.DiffusionPipeline.from_pretrained("{base}")
pipe.load_textual_inversion("{{location}}")
pipe({prompt}).images[0].save("picture.png")
```
"""
_USAGE_OF_BOTH = """
In PyTorch diffusers each text encoder gets its own vectors:

```python
from safetensors.torch import load_file

vectors = load_file("learned_embeds.safetensors")
for key, n in (("clip_l", ""), ("clip_g", "_2")):
    encoder, tokenizer = getattr(pipe, f"text_encoder{{n}}"), getattr(pipe, f"tokenizer{{n}}")
    pipe.load_textual_inversion(
        vectors[key], token={word}, text_encoder=encoder, tokenizer=tokenizer
    )
```
"""
_CAPTION = "caption of the word"
"""The name of the column that has an example's caption."""


@dataclasses.dataclass(frozen=True)
class TextualInversionDataConfig(CaptionedDataConfig):
    """A data set of a few images of what the word stands for."""

    random_flip: bool = True
    """Mirror half of the images."""
    caption_column: str = ""
    """The column with captions that name the word: a text, or a list from which one is drawn each
    time; by default captions are drawn from diffusers' for the learnable_property."""


@dataclasses.dataclass(frozen=True)
class TextualInversionOptimizerConfig(OptimizerConfig):
    """How gradients become updates of the word's embeddings."""

    max_grad_norm: Annotated[float, Meta(gt=0)] = math.inf
    """The global norm to which larger gradients are scaled down; inf leaves them unchanged."""


@dataclasses.dataclass(frozen=True)
class TextualInversionConfig(DenoiserConfig):
    """Train the embeddings of a new word on a few images; the checkpoint stays as it is."""

    refused: ClassVar[tuple[str, ...]] = (
        *("from_scratch", "train_text_encoder", "text_encoder_learning_rate", "lora"),
    )
    refusal: ClassVar[str] = "textual inversion trains the embeddings of the word alone"

    placeholder_token: str = ""
    """The new word, such as "<cat-toy>"; brackets keep it from being found inside other words."""
    initializer_token: str = ""
    """The word whose embeddings the new word's begin with. A text of several tokens gives the first
    embedding its first token's and so on, in turn."""
    num_vectors: Annotated[int, Meta(ge=1, le=1000)] = 1
    """The number of the word's embeddings; in a prompt it takes as many tokens."""
    learnable_property: Literal["object", "style"] = "object"
    """What the word stands for, which decides the captions: "a photo of a {}", or "a painting in
    the style of {}"."""
    save_pipeline: bool = False
    """Write the whole pipeline with the word, too, not only its embeddings."""
    data: TextualInversionDataConfig = dataclasses.field(default_factory=TextualInversionDataConfig)
    """The examples."""
    optimizer: TextualInversionOptimizerConfig = dataclasses.field(
        default_factory=TextualInversionOptimizerConfig
    )
    """The options of the optimizer."""


class TextualInversion(Denoiser):
    """The recipe that trains a word: `diffusax.training.textual_inversion(config)`."""

    name = "textual-inversion"
    config: TextualInversionConfig

    def __init__(self, config: TextualInversionConfig, *, compile_only: bool = False):
        """Reads the configs and opens the data set.

        compile_only: see `TextToImage`.

        Raises:
            ValueError: the checkpoint, the word or the data set cannot be used, or options do not
                go together; says why.
        """
        require_options(config, ("placeholder_token", "initializer_token"))
        data = config.data
        columns = tuple(filter(None, (data.image_column, data.caption_column)))
        super().__init__(config, columns, compile_only=compile_only)
        if not all(hasattr(tokenizer, "windows") for tokenizer in self.base.tokenizers.values()):
            raise ValueError(
                f"{config.model} is {self.base.family.name}, whose encoders take no new words; "
                "start from Stable Diffusion"
            )
        if self.embedded:
            raise ValueError(
                f"{data.path} holds text embeddings, which cannot name the word; write it again "
                "without --text-embeddings"
            )
        if not data.streaming:
            self.source = Repeated(self.source)
        word = config.placeholder_token
        self.base = with_word(self.base, word, config.num_vectors, config.initializer_token)
        self.denoising = dataclasses.replace(self.denoising, networks=self.base.networks)
        # All networks are frozen; the word's rows are no network's own parameters.
        self.components = ()

    def shapes(self) -> Params:
        return {name: self.networks[name].shapes[WORDS] for name in self.base.text_encoders}

    def trained(self, mesh: Mesh | None = None) -> Params:
        """Returns the word's first embeddings, n d float32, by text encoder."""
        return {
            name: to_host(self.load(name, device=mesh)[WORDS]) for name in self.base.text_encoders
        }

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Returns a row's pixels, the tokens of its caption and, where the family has them, sizes.

        A cached row keeps its latents and sizes, and gets another caption.

        Raises:
            ValueError: the row cannot be used; says why.
        """
        caption = self._caption(row, rng)
        if self.cached:
            return {**row, **self.base.tokenize(caption)}
        config = dataclasses.replace(self.config.data, caption_column=_CAPTION)
        return caption_example(config, self.base, self.size, {**row, _CAPTION: caption}, rng)

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        return super().loss({}, self._with_words(trained, frozen), batch, keys)

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        return super().validate({}, self._with_words(trained, frozen))

    def save(self, trained: Params, folder: Path) -> None:
        """Writes the embeddings, learned_embeds.safetensors, and if asked the whole pipeline."""
        config = self.config
        folder.mkdir(parents=True, exist_ok=True)
        vectors = {name: np.asarray(rows["embedding"]) for name, rows in trained.items()}
        write_embedding(folder / FILE, config.placeholder_token, vectors)
        if config.save_pipeline:
            pipe = DiffusionPipeline.from_pretrained(
                self.base.folder, dtype="float32", scheduler=self.base.scheduler
            )
            pipe.load_textual_inversion(folder)
            pipe.save_pretrained(folder)

    def card(self) -> dict[str, Any]:
        config = self.config
        templates = TEMPLATES[config.learnable_property]
        prompt = json.dumps(templates[0].format(config.placeholder_token), ensure_ascii=False)
        usage = _USAGE.format(base=config.model, prompt=prompt)
        if len(self.base.text_encoders) > 1:
            usage += _USAGE_OF_BOTH.format(word=json.dumps(config.placeholder_token))
        else:
            usage += "\nPyTorch diffusers loads the same file by the same lines.\n"
        return {**super().card(), "tags": ["textual_inversion", "diffusax"], "usage": usage}

    def _caption(self, row: dict[str, Any], rng: np.random.Generator) -> str:
        word, column = self.config.placeholder_token, self.config.data.caption_column
        if not column:
            templates = TEMPLATES[self.config.learnable_property]
            return templates[rng.integers(len(templates))].format(word)
        caption = choose_caption(row[column], rng)
        if word.lower() not in " ".join(caption.lower().split()):
            raise ValueError(f"the caption {caption[:100]!r} does not name {word!r}")
        return caption

    def _with_words(self, trained: Params, frozen: Params) -> Params:
        """Returns the frozen parameters with these embeddings of the word."""
        encoders = {name: {**frozen[name], WORDS: rows} for name, rows in trained.items()}
        return {**frozen, **encoders}


textual_inversion = TextualInversion


def with_word(base: BaseModel, word: str, count: int, initializer: str) -> BaseModel:
    """Returns the checkpoint with a word of `count` embeddings, which its parameters have as rows.

    All tokenizers know the word, and all text encoders have rows for it (`EncoderWithWords`). They
    begin as those of the initializer's tokens, which are repeated in turn until there are enough.

    Args:
        base: the checkpoint.
        word: the word, such as "<cat-toy>".
        count: the number of its embeddings in each text encoder.
        initializer: a text of at least one and at most `count` tokens.

    Raises:
        ValueError: the word or the initializer cannot be used, or a text encoder is not CLIP's;
            says why.
    """
    if word != " ".join(word.split()):
        raise ValueError(
            f"placeholder_token must have no spaces around it and none in a row (got {word!r})"
        )
    tokenizers, networks = dict(base.tokenizers), dict(base.networks)
    for encoder in base.family.text_encoders:
        tokenizer, network = base.tokenizers[encoder.tokenizer], base.networks[encoder.name]
        _check_encoder(base, encoder.name, tokenizer, network)
        _check_word(encoder.tokenizer, tokenizer, word, count)
        initial = _initial_tokens(tokenizer, count, initializer)
        known = tokenizer.with_words(token_names(word, count))
        tokenizers[encoder.tokenizer] = known
        first = known.words[word]
        networks[encoder.name] = EncoderWithWords.of(network, first=first, initial=initial)
    return dataclasses.replace(base, tokenizers=tokenizers, networks=networks)


def _check_encoder(base: BaseModel, name: str, tokenizer: object, network: Network) -> None:
    if not isinstance(tokenizer, CLIPTokenizer) or not issubclass(
        network.module_class, CLIPTextModel
    ):
        raise ValueError(
            f"{base.folder} has the {name} {network.class_name}, and words can be taught to CLIP's "
            "text encoders alone; use a checkpoint of Stable Diffusion 1, 2 or XL"
        )


def _check_word(name: str, tokenizer: CLIPTokenizer, word: str, count: int) -> None:
    """Raises ValueError where a tokenizer has the word already or texts have no room for it."""
    room = tokenizer.model_max_length - 2
    if count > room:
        raise ValueError(
            f"num_vectors={count} is more than the {room} tokens that a text has; use fewer"
        )
    added = {name.lower(): name for name in tokenizer.words}
    taken = taken_name(word, count, added, tokenizer.tokenizer.get_vocab())
    if taken is not None:
        raise ValueError(
            f"placeholder_token={word!r} cannot be added, as {name} has {taken!r} already; use "
            "another word"
        )


def _initial_tokens(tokenizer: CLIPTokenizer, count: int, initializer: str) -> tuple[int, ...]:
    ids = tokenizer.ids_of(initializer)
    if not 1 <= len(ids) <= count:
        raise ValueError(
            f"initializer_token={initializer!r} has {len(ids)} tokens for num_vectors={count}; use "
            "a text of at least one token and at most as many as there are vectors"
        )
    return tuple(ids[i % len(ids)] for i in range(count))
