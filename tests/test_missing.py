"""Names of diffusers that are not here say what is."""

import importlib

import diffusers
import diffusers.optimization
import diffusers.training_utils
import pytest
import torch
import transformers

import diffusax
import diffusax.optimization
import diffusax.training_utils
from diffusax import samplers
from diffusax.boundary.messages import NETWORK, PIPELINE, SCHEDULER
from diffusax.models import MODELS
from diffusax.networks import Model
from diffusax.samplers import SCHEDULERS

PIPELINES = ("StableDiffusionImg2ImgPipeline", "StableDiffusionXLControlNetInpaintPipeline")
STEPPING = [
    "set_timesteps",
    "timesteps",
    "sigmas",
    "init_noise_sigma",
    "order",
    "scale_model_input",
    "step",
    "add_noise",
    "scale_noise",
    "get_velocity",
    "set_begin_index",
    "begin_index",
    "step_index",
    "index_for_timestep",
]


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    return diffusax.DiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])


def test_hasattr_stays_false(pipe):
    xl = diffusax.StableDiffusionXLImg2ImgPipeline
    for owner, hints in (
        (xl, PIPELINE),
        (pipe.unet, NETWORK.keys() - {"from_single_file"}),
        (Model, NETWORK),
        # Some have these two as options.
        *((cls, SCHEDULER.keys() - {"sigma_min", "sigma_max"}) for cls in SCHEDULERS.values()),
    ):
        assert [name for name in hints if hasattr(owner, name)] == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("load_lora_into_unet", "load_lora_weights, set_adapters, fuse_lora and their like"),
        ("prepare_image", "docs/reference/functional.md"),
        ("from_ckpt", "from_single_file"),
    ],
)
def test_pipelines_name_what_there_is_instead(pipe, name, hint):
    message = f"'StableDiffusionPipeline' has no attribute '{name}'; .*{hint}"
    for owner in (pipe, type(pipe)):
        with pytest.raises(AttributeError, match=message):
            getattr(owner, name)


def test_networks_and_schedulers_do_too(pipe):
    with pytest.raises(AttributeError, match=r"'UNet2D\w+' has .* 'load_attn_procs'; .*LoRA"):
        _ = pipe.unet.load_attn_procs
    with pytest.raises(AttributeError, match=r"scheduler\.schedule\(steps\)\.rows"):
        _ = pipe.scheduler.convert_model_output
    with pytest.raises(AttributeError, match="UNet2DConditionModel, AutoencoderKL and ControlNetM"):
        diffusax.AutoencoderTiny.from_single_file("taesd.safetensors")


def test_layers_say_where_they_are(pipe):
    with pytest.raises(AttributeError, match=r"no attribute 'down_blocks'; .*model\.network\.mod"):
        _ = pipe.unet.down_blocks


def test_a_name_that_nobody_has_is_refused_as_ever(pipe):
    for owner in (pipe, pipe.unet, pipe.scheduler):
        with pytest.raises(AttributeError, match="no attribute 'unett'"):
            _ = owner.unett


# What asks for a class, an object or a file that programs do not meet, so that no sentence is owed.
LEFT_OUT = {
    "networks": """T_destination call_super_init dump_patches add_model_tags base_model_prefix
        can_record_outputs config_class dummy_inputs from_transformer get_compiled_call
        get_correct_attn_implementation get_correct_experts_implementation
        get_expanded_tied_weights_keys get_experts_implementation get_init_context
        get_parameter_or_buffer get_position_embeddings init_weights initialize_weights
        input_modalities is_activation_checkpointing is_backend_compatible is_custom_code
        is_remote_code loss_function main_input_name mark_tied_weights_as_initialized model_tags
        named_non_persistent_buffers output_modalities post_init resize_position_embeddings
        retrieve_modules_from_names set_experts_implementation smart_apply
        supports_gradient_checkpointing
        text_encoder_name unet_name use_kernels warn_if_padding_and_no_attention_mask
        downscale_factor total_downscale_factor""",
    "tokenizers": """SPECIAL_TOKENS_ATTRIBUTES add_bos_token add_eos_token apply_chat_template
        can_save_slow_tokenizer clean_up_tokenization convert_added_tokens
        convert_to_native_format decoder encode_message_with_chat_template get_chat_template
        get_response_parser get_sentinel_token_ids get_sentinel_tokens get_special_tokens_mask
        max_len_sentences_pair model pad pad_token_type_id parse_response
        pretrained_vocab_files_map push_to_hub register_for_auto_class save_chat_templates
        save_vocabulary set_truncation_and_padding slow_tokenizer_class train_new_from_iterator
        update_post_processor vocab_files_names""",
    "processors": """config config_name extract_init_dict from_config get_config_dict
        has_compatibles ignore_for_config load_config register_for_auto_class register_to_config
        save_config to_json_file to_json_string""",
    "training_utils": """compute_confidence_aware_loss compute_dream_and_update_latents
        convert_state_dict_to_diffusers convert_state_dict_to_peft empty_device_cache
        find_nearest_bucket generate_aspect_ratio_buckets get_fsdp_kwargs_from_accelerator
        offload_models parse_buckets_string resolve_interpolation_mode unet_lora_state_dict
        wrap_with_fsdp""",
    "utils": """DummyObject OptionalDependencyNotAvailable PushToHubMixin apply_lora_scale
        check_peft_version convert_all_state_dict_to_peft
        convert_sai_sd_control_lora_state_dict_to_peft convert_state_dict_to_diffusers
        convert_state_dict_to_kohya convert_state_dict_to_peft convert_unet_state_dict_to_peft
        delete_adapter_layers encode_video export_to_obj export_to_ply extract_commit_hash
        get_adapter_name get_class_from_dynamic_module get_module_from_name
        get_objects_from_module get_peft_kwargs get_submodule_by_name http_user_agent load_video
        recurse_remove_peft_layers remote_decode require_peft_backend requires_backends
        scale_lora_layers set_adapter_layers set_weights_and_activate_adapters
        state_dict_all_zero unscale_lora_layers""",
    "optimization": "",
    "logging": "EmptyTqdm warning_advice",
}


def public(owner):
    return {name for name in dir(owner) if name[0] != "_"}


def lacking(theirs, ours, *explained):
    """The public names that ours lacks without a sentence."""
    return {n for n in public(theirs) if not hasattr(ours, n)} - {n for e in explained for n in e}


def test_every_name_of_pipelines_and_schedulers_is_there_or_explained():
    for name in (*diffusax.pipelines.classes.__all__, "DiffusionPipeline"):
        if not hasattr(diffusers, name):
            # diffusers has FLUX.3 as modular blocks alone, and no edits by Krea 2 and Z-Image.
            assert name.startswith(("Flux3", "Krea2Edit", "ZImageEdit"))
            continue
        theirs, ours = getattr(diffusers, name), getattr(diffusax, name)
        assert lacking(theirs, ours, PIPELINE) == set(), name
    for name in SCHEDULERS:
        theirs, ours = (getattr(module, name)() for module in (diffusers, samplers))
        assert [n for n in STEPPING if hasattr(theirs, n) and not hasattr(ours, n)] == []
        assert lacking(theirs, ours, SCHEDULER) == set(), name


def test_every_name_of_networks_is_there_or_explained():
    left = LEFT_OUT["networks"].split()
    # Other tests add networks of their own.
    for name in MODELS.keys() & {*dir(diffusers), *dir(transformers)}:
        theirs = getattr(diffusers if hasattr(diffusers, name) else transformers, name)
        assert lacking(theirs, getattr(diffusax, name), NETWORK, left) == set(), name


@pytest.mark.parametrize(
    ("kind", "theirs", "ours"),
    [
        *(
            ("tokenizers", getattr(transformers, name), getattr(diffusax, name))
            for name in ("CLIPTokenizer", "T5Tokenizer", "Qwen2Tokenizer")
        ),
        (
            "processors",
            diffusers.image_processor.VaeImageProcessor,
            diffusax.image_processor.VaeImageProcessor,
        ),
    ],
)
def test_every_name_of_tokenizers_and_processors_is_there_or_left_out(kind, theirs, ours):
    assert lacking(theirs, ours, LEFT_OUT[kind].split()) == set()


@pytest.mark.parametrize("name", ["utils", "training_utils", "optimization", "utils.logging"])
def test_every_function_of_modules_is_there_or_left_out(name):
    theirs, ours = (importlib.import_module(f"{lib}.{name}") for lib in ("diffusers", "diffusax"))
    own = {
        n
        for n, value in vars(theirs).items()
        if n[0] != "_" and getattr(value, "__module__", "").startswith(f"diffusers.{name}")
    }
    left = LEFT_OUT[name.rpartition(".")[2]].split()
    assert {n for n in own if not hasattr(ours, n)} - {*left} == set()


def test_words_that_diffusers_taught_are_known_here(tiny_checkpoints, tmp_path):
    folder, _ = tiny_checkpoints.pipeline("sd")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    torch.manual_seed(0)
    embedding = torch.randn(theirs.text_encoder.config.hidden_size)
    theirs.load_textual_inversion({"<toy>": embedding})
    theirs.save_pretrained(tmp_path)
    ours = diffusax.StableDiffusionPipeline.from_pretrained(tmp_path)
    options = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    expected = theirs.encode_prompt("a <toy> here", **options)[0].detach().numpy()
    found, other = (
        ours.encode_prompt(text, **options)[0].numpy() for text in ("a <toy> here", "a toy here")
    )
    assert abs(found - expected).max() < 1e-4
    assert abs(other - expected).max() > 1e-2
