"""The paths from which programs import diffusers' names, as modules that hold nothing of their own.

A path of `PATHS` gives every name that diffusax has, and those of `_NAMES`, from wherever it is.
"""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

PATHS = {
    "schedulers": """scheduling_utils scheduling_ddim scheduling_ddpm scheduling_pndm scheduling_lcm
        scheduling_tcd scheduling_euler_discrete scheduling_euler_ancestral_discrete
        scheduling_heun_discrete scheduling_lms_discrete scheduling_k_dpm_2_discrete
        scheduling_k_dpm_2_ancestral_discrete scheduling_dpmsolver_multistep
        scheduling_dpmsolver_singlestep scheduling_dpmsolver_sde scheduling_deis_multistep
        scheduling_unipc_multistep scheduling_edm_euler scheduling_edm_dpmsolver_multistep
        scheduling_sasolver scheduling_flow_match_euler_discrete scheduling_flow_match_heun_discrete
        scheduling_flow_match_lcm""",
    "pipelines": """pipeline_utils auto_pipeline
        stable_diffusion stable_diffusion.pipeline_stable_diffusion
        stable_diffusion.pipeline_stable_diffusion_img2img
        stable_diffusion.pipeline_stable_diffusion_inpaint
        stable_diffusion.pipeline_stable_diffusion_instruct_pix2pix
        stable_diffusion.pipeline_output stable_diffusion.safety_checker
        stable_diffusion_xl stable_diffusion_xl.pipeline_stable_diffusion_xl
        stable_diffusion_xl.pipeline_stable_diffusion_xl_img2img
        stable_diffusion_xl.pipeline_stable_diffusion_xl_inpaint
        stable_diffusion_xl.pipeline_stable_diffusion_xl_instruct_pix2pix
        stable_diffusion_xl.pipeline_output
        controlnet controlnet.pipeline_controlnet
        controlnet.pipeline_controlnet_img2img controlnet.pipeline_controlnet_inpaint
        controlnet.pipeline_controlnet_sd_xl controlnet.pipeline_controlnet_sd_xl_img2img
        controlnet.pipeline_controlnet_inpaint_sd_xl
        t2i_adapter.pipeline_stable_diffusion_adapter
        t2i_adapter.pipeline_stable_diffusion_xl_adapter
        latent_consistency_models latent_consistency_models.pipeline_latent_consistency_text2img
        latent_consistency_models.pipeline_latent_consistency_img2img
        flux flux.pipeline_flux flux.pipeline_flux_img2img flux.pipeline_flux_inpaint
        flux.pipeline_flux_fill flux.pipeline_flux_kontext flux.pipeline_flux_controlnet
        flux.pipeline_output flux2 flux2.pipeline_flux2_klein flux2.pipeline_flux2_klein_kv
        flux2.pipeline_output
        krea2 krea2.pipeline_krea2 krea2.pipeline_output
        qwenimage qwenimage.pipeline_qwenimage qwenimage.pipeline_qwenimage_img2img
        qwenimage.pipeline_qwenimage_inpaint qwenimage.pipeline_qwenimage_edit
        qwenimage.pipeline_qwenimage_edit_plus qwenimage.pipeline_output
        qwenimage21 qwenimage21.pipeline_qwenimage21
        z_image z_image.pipeline_z_image z_image.pipeline_output
        ddim ddim.pipeline_ddim ddpm ddpm.pipeline_ddpm""",
    "models": """modeling_utils attention_processor autoencoders autoencoders.autoencoder_kl
        autoencoders.autoencoder_tiny autoencoders.autoencoder_asym_kl autoencoders.vae
        autoencoders.autoencoder_kl_qwenimage autoencoders.autoencoder_kl_qwenimage21
        autoencoders.autoencoder_kl_wan
        modeling_outputs autoencoder_kl unet_2d_condition unets unets.unet_2d
        unets.unet_2d_condition controlnets controlnets.controlnet
        controlnets.multicontrolnet controlnets.controlnet_flux
        transformers.transformer_flux transformers.transformer_flux2
        transformers.transformer_flux3 transformers.transformer_krea2
        transformers.transformer_qwenimage transformers.transformer_qwenimage21
        transformers.transformer_z_image adapter auto_model""",
    "loaders": "lora_pipeline lora_base textual_inversion single_file ip_adapter peft unet",
    "hooks": "first_block_cache taylorseer_cache",
    "configuration_utils": "",
    "utils": "loading_utils pil_utils import_utils outputs testing_utils doc_utils",
}
_OUTPUT = "diffusax.images.outputs:ImagePipelineOutput"
_STEP = "diffusax.samplers.by_hand:SchedulerOutput"
_PIPELINE = "diffusax.pipelines.pipeline.pipeline:DiffusionPipeline"
_NAMES = {
    **{
        f"{name}PipelineOutput": _OUTPUT
        for name in (
            *("Image", "StableDiffusion", "StableDiffusionXL", "Flux", "Flux2", "Krea2"),
            *("QwenImage", "ZImage"),
        )
    },
    **{
        f"{name}SchedulerOutput": _STEP
        for name in ("", "DDIM", "DDPM", "LCM", "TCD", "EulerDiscrete", "EulerAncestralDiscrete")
    },
    **{
        f"FlowMatch{name}SchedulerOutput": _STEP
        for name in ("EulerDiscrete", "HeunDiscrete", "LCM")
    },
    "SchedulerMixin": "diffusax.samplers.schedulers.scheduler:Scheduler",
    "KarrasDiffusionSchedulers": "diffusax.samplers.schedulers.scheduler:Scheduler",
    "ModelMixin": "diffusax.networks.model:Model",
    "StableDiffusionMixin": _PIPELINE,
    "FlowPipelineMixin": _PIPELINE,
    "LoraLoaderMixin": "diffusax.pipelines.pipeline.lora_methods:LoraMethods",
    "StableDiffusionLoraLoaderMixin": "diffusax.pipelines.pipeline.lora_methods:LoraMethods",
    "StableDiffusionXLLoraLoaderMixin": "diffusax.pipelines.pipeline.lora_methods:LoraMethods",
    "FluxLoraLoaderMixin": "diffusax.pipelines.pipeline.lora_methods:LoraMethods",
    "TextualInversionLoaderMixin": "diffusax.pipelines.pipeline.textual_inversion:TextualInversion",
    "IPAdapterMixin": "diffusax.pipelines.pipeline.ip_adapter_methods:IPAdapterMethods",
    "FromSingleFileMixin": "diffusax.pipelines.pipeline.single_file:SingleFile",
    "AutoencoderKLOutput": "diffusax.networks.outputs:AutoencoderKLOutput",
    "DecoderOutput": "diffusax.networks.outputs:DecoderOutput",
    "DiagonalGaussianDistribution": "diffusax.networks.outputs:DiagonalGaussianDistribution",
    "VaeImageProcessor": "diffusax.image_processor:VaeImageProcessor",
    "IPAdapterMaskProcessor": "diffusax.image_processor:IPAdapterMaskProcessor",
    "AttnProcessor": "diffusax.networks.module_methods:AttnProcessor",
    "AttnProcessor2_0": "diffusax.networks.module_methods:AttnProcessor2_0",
    **{
        name: f"diffusax.utils:{name}"
        for name in ("rescale_noise_cfg", "retrieve_timesteps", "retrieve_latents", "randn_tensor")
    },
    "EMAModel": "diffusax.training_utils:EMAModel",
    **{
        name: f"diffusax.optimization:{name}"
        for name in (
            "get_scheduler",
            "get_constant_schedule",
            "get_constant_schedule_with_warmup",
            "get_cosine_schedule_with_warmup",
            "get_cosine_with_hard_restarts_schedule_with_warmup",
            "get_linear_schedule_with_warmup",
            "get_polynomial_decay_schedule_with_warmup",
        )
    },
    "logging": "diffusax.utils:logging",
}
"""diffusers' names of what has another name or place here."""
_REASONS = {
    "StableDiffusionSafetyChecker": "no pipeline runs it; leave safety_checker out",
    **dict.fromkeys(
        ("ConfigMixin", "register_to_config"),
        "networks are Flax modules with a config; see docs/reference/functional.md",
    ),
    "Attention": "attention is a function of diffusax.models.ops, which takes no processors",
}


def find_name(name: str) -> Any:
    """Returns what diffusers' name stands for.

    Raises:
        AttributeError: diffusax does not have it.
    """
    if name in _NAMES:
        module, _, attribute = _NAMES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    return getattr(importlib.import_module("diffusax.api"), name)


class NamesOnly(types.ModuleType):
    """A module of `PATHS`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if f"{self.__name__}.{name}" in sys.modules:
            return sys.modules[f"{self.__name__}.{name}"]
        try:
            found = self._find(name)
        except AttributeError:
            if name in _REASONS:
                # `from path import name` would hide the text of an AttributeError.
                raise ImportError(f"diffusax has no {name}; {_REASONS[name]}") from None
            # torch.compile and others ask all modules for names such as "torch".
            message = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(message) from None
        setattr(self, name, found)
        return found

    def _find(self, name: str) -> Any:
        if self.__name__.startswith("diffusax.utils."):
            return getattr(importlib.import_module("diffusax.utils"), name)
        return find_name(name)

    def __dir__(self) -> list[str]:
        return [*_NAMES, *importlib.import_module("diffusax.api").__all__]


def register_paths() -> None:
    """Makes the paths known to Python; imports nothing."""
    for root, below in PATHS.items():
        for path in (root, *(f"{root}.{name}" for name in below.split())):
            name = f"diffusax.{path}"
            # Folders of the package keep what they hold.
            if path in ("pipelines", "models", "models.autoencoders", "utils"):
                continue
            module = NamesOnly(name, f"diffusers' names, as the module diffusers.{path} has them.")
            module.__path__ = []
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            sys.modules.setdefault(name, module)
