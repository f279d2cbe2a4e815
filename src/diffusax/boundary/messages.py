"""Names that diffusers has and diffusax lacks, with a sentence that says what to use instead."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_LORA = (
    "LoRAs belong to the pipeline: load_lora_weights, set_adapters, fuse_lora and their like are "
    "its methods, see docs/tasks/loras.md"
)
_SINGLE_FILE = (
    "from_single_file(...) loads .safetensors and .gguf files; a .ckpt file is a pickle, which "
    "could run code"
)
_SINGLE_NETWORK = (
    "UNet2DConditionModel, AutoencoderKL and ControlNetModel have it, and the transformers of FLUX "
    "and Z-Image with their text encoders; they and pipelines are what single files hold"
)
_PIECES = (
    "a call is one program here: pipe.generate_fn and pipe.prepare_inputs are it as a pure "
    "function, see docs/reference/functional.md"
)
_STEPS = (
    "a step is a row of coefficients: scheduler.schedule(steps).rows has them, and step(...) gives "
    "prev_sample and for most samplers pred_original_sample"
)
_IMMUTABLE = (
    "the options of a scheduler do not change: pipe.scheduler = type(pipe.scheduler).from_config("
    "pipe.scheduler.config, shift=3.0) makes another one, which compiles nothing"
)
LAYERS = (
    "the parameters of layers are in model.params, and model.network.module(model.params) makes a "
    "Flax module with the layers as attributes; see docs/reference/functional.md"
)
_LEVELS = "scheduler.sigmas has the noise levels, and those of the training before set_timesteps"
_MODULE = (
    "a model is a network with the tree of its parameters, model.params; "
    "see docs/reference/functional.md"
)
_CONFIG = (
    "options are read as config and written by save_pretrained; another class is made by "
    "from_pretrained or from_pipe"
)
_OFFLOAD = (
    "memory is saved by enable_model_cpu_offload of the pipeline, by a smaller dtype and by "
    "from_pretrained(mesh='tensor=2')"
)
_QUANTISED = "parameters are never quantised"
_DISTRIBUTED = "a mesh splits batches and parameters: from_pretrained(mesh='data=4,tensor=2')"
_FRAMES = (
    "an autoencoder of videos encodes and decodes images here, which need no frames before them"
)
_SEEING = (
    "images are read by the checkpoint's processor, which counts positions, and by the vision "
    "network; see docs/reference/functional.md"
)
_LAYOUT = "the layout of tokens is the network's own; img_shapes and img_mask say what it is"
_GENERATE = "language models are text encoders here; transformers writes texts"


def _hints(reasons: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names}


def _words(text: str) -> list[str]:
    return text.split()


PIPELINE = _hints(
    {
        _LORA: _words(
            "load_lora_into_unet load_lora_into_text_encoder load_lora_into_transformer "
            "write_lora_layers pack_weights unet_name text_encoder_name transformer_name"
        ),
        _SINGLE_FILE: _words("from_ckpt"),
        _PIECES: _words(
            "prepare_latents _encode_prompt decode_latents prepare_image prepare_control_image "
            "prepare_mask_latents prepare_image_latents prepare_video_latents prepare_masks "
            "preprocess_conditions check_image check_conditions prepare_position_ids "
            "get_text_hidden_states"
        ),
        _CONFIG: _words(
            "config_name extract_init_dict from_config get_config_dict has_compatibles "
            "ignore_for_config load_config register_for_auto_class save_config to_json_file "
            "to_json_string parameters"
        ),
        _OFFLOAD: _words("model_cpu_offload_seq"),
    }
)
"""Hints for pipelines, by name."""
NETWORK = _hints(
    {
        _LORA: _words(
            "load_attn_procs save_attn_procs load_lora_adapter save_lora_adapter add_adapter "
            "set_adapter set_adapters delete_adapters delete_adapter active_adapters "
            "enable_adapters disable_adapters enable_lora disable_lora enable_lora_hotswap "
            "fuse_lora unfuse_lora unload_lora load_adapter enable_peft_hotswap "
            "get_adapter_state_dict"
        ),
        _SINGLE_NETWORK: _words("from_single_file"),
        _CONFIG: _words(
            "extract_init_dict get_config_dict has_compatibles ignore_for_config "
            "register_for_auto_class register_to_config to_json_file"
        ),
        _OFFLOAD: _words("enable_group_offload enable_layerwise_casting"),
        _MODULE: _words(
            "modules named_modules children named_children get_submodule add_module "
            "register_forward_hook register_forward_pre_hook register_full_backward_hook "
            "register_buffer register_parameter register_module apply_ set_submodule double "
            "register_backward_hook register_full_backward_pre_hook get_buffer extra_repr "
            "register_state_dict_post_hook register_state_dict_pre_hook share_memory type "
            "register_load_state_dict_post_hook register_load_state_dict_pre_hook xpu mtia ipu "
            "get_extra_state set_extra_state get_encoder get_decoder set_encoder set_decoder "
            "get_output_embeddings set_input_embeddings set_output_embeddings base_model "
            "create_coordinate_grid patchify_and_embed patchify_and_embed_omni unpatchify "
            "to_empty get_time_embed get_class_embed get_aug_embed process_encoder_hidden_states "
            "tiled_encode tiled_decode blend_h blend_v scale_latents unscale_latents"
        ),
        _FRAMES: _words("clear_cache"),
        _SEEING: _words(
            "get_image_features get_video_features get_placeholder_mask get_rope_index "
            "get_vision_position_ids compute_3d_position_ids permute_input_for_window_attn"
        ),
        _LAYOUT: _words("build_token_metadata"),
        _QUANTISED: _words("dequantize"),
        _GENERATE: _words(
            "generate generate_batch can_generate prepare_inputs_for_generation "
            "compute_transition_scores heal_tokens adjust_generation_fn load_custom_generate "
            "continuous_batching_context_manager init_continuous_batching "
            "destroy_cached_continuous_batching_manager generation_config_class "
            "accepts_loss_kwargs"
        ),
        _DISTRIBUTED: _words(
            "enable_parallelism fsdp_plan fsdp_size tp_plan tp_size pp_plan ep_plan "
            "init_parallel_plans maybe_distribute_model prepare_distribute_model "
            "gather_sharded_state_dict_for_save save_distributed_checkpoint "
            "should_save_on_this_rank barrier_after_gathered_checkpoint_save "
            "is_distributed_loading_by_transformers supports_pp_plan supports_tp_plan "
            "supports_context_parallel"
        ),
    }
)
"""Hints for networks, by name."""
SCHEDULER = _hints(
    {
        _STEPS: _words(
            "convert_model_output previous_timestep step_plms step_prk "
            "model_outputs precondition_inputs precondition_noise precondition_outputs "
            "time_shift stretch_shift_to_terminal counter "
            "cur_model_output cur_sample derivatives dt ets get_lms_coefficient "
            "get_order_list get_scalings_for_boundary_condition_discrete is_scale_input_called "
            "last_sample lower_order_nums mid_point_sigma noise_sampler one order_list "
            "plms_timesteps pndm_order prev_derivative prk_timesteps sample "
            "solver_p timestep_list deis_first_order_update dpm_solver_first_order_update "
            "multistep_deis_second_order_update multistep_deis_third_order_update "
            "multistep_dpm_solver_second_order_update multistep_dpm_solver_third_order_update "
            "multistep_uni_c_bh_update multistep_uni_p_bh_update get_coefficients_fn "
            "get_coefficients_exponential_negative get_coefficients_exponential_positive "
            "lagrange_polynomial_coefficient stochastic_adams_bashforth_update "
            "stochastic_adams_moulton_update "
            "singlestep_dpm_solver_second_order_update singlestep_dpm_solver_third_order_update "
            "singlestep_dpm_solver_update"
        ),
        _IMMUTABLE: _words("set_shift set_scale_factors register_to_config"),
        _LEVELS: _words("sigma_min sigma_max"),
        _CONFIG: _words(
            "extract_init_dict get_config_dict has_compatibles ignore_for_config "
            "register_for_auto_class"
        ),
    }
)
"""Hints for schedulers, by name."""


def hinting(hints: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Makes a class, and its subclasses, explain missing names: the error says what to use instead.

    `hasattr` stays False for the class and for its instances. Names that the class has stay.

    Args:
        hints: the sentence for each name.
    """

    def decorate(cls: type[T]) -> type[T]:
        for name, hint in hints.items():
            if not hasattr(cls, name):
                setattr(cls, name, _Missing(name, hint))
        return cls

    return decorate


def missing_attribute(cls: type, name: str) -> AttributeError:
    """Returns the error to raise when an instance of a class is asked for a name that it lacks."""
    found = next((vars(kind)[name] for kind in cls.__mro__ if name in vars(kind)), None)
    hint = f"; {found.hint}" if isinstance(found, _Missing) else ""
    return AttributeError(f"{cls.__name__!r} has no attribute {name!r}{hint}")


class _Missing:
    """An attribute that is not there."""

    def __init__(self, name: str, hint: str):
        self.name, self.hint = name, hint

    def __get__(self, instance: Any, owner: type) -> Any:
        raise missing_attribute(owner, self.name)


def require_extra(module: str, extra: str) -> Any:
    """Imports and returns a module of an optional dependency.

    Raises:
        ImportError: the module is not installed; names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed here; install it with {install_command(extra)} ({error})"
        ) from None


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of the package, however that was installed."""
    return f"pip install 'diffusax[{extra}]'"


def escaped(text: object) -> str:
    """Returns the text with control characters and broken bytes of file names escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
