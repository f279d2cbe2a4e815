"""Components of a pipeline's checkpoint as a family asks for them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.tiny_language import build

from diffusax.pipelines.components.loading import load_components
from diffusax.pipelines.families.family import diffusers_components


@pytest.mark.parametrize("kind", ["Qwen3VLForConditionalGeneration", "Qwen3VLModel"])
def test_a_family_leaves_out_what_its_text_encoder_reads_images_with(tmp_path, kind):
    build(kind).save_pretrained(tmp_path / "text_encoder")
    listed = {"text_encoder": ["transformers", kind]}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "Toy", **listed}))
    found = {}
    for options in ((), (("vision_config", None),)):
        names = ("tokenizer", "text_encoder")
        parts = diffusers_components("transformer", names, tokenizer=None, text_options=options)
        family = SimpleNamespace(options=())
        target = SimpleNamespace(all_components=parts, extra_components=(), family=family)
        given = [part.name for part in parts if part.name != "text_encoder"]
        found[options] = load_components(target, tmp_path, given, "bfloat16")["text_encoder"]
    whole, alone = found.values()
    assert whole.class_name == alone.class_name == kind
    assert 0 < alone.num_params < whole.num_params
    names = [{*m.params.get("model", m.params)} for m in (whole, alone)]
    assert names == [{"language_model", "visual"}, {"language_model"}]
    ids = np.arange(10, 20)[None]
    np.testing.assert_array_equal(whole(ids)[0], alone(ids)[0])
