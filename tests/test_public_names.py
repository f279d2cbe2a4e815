"""The modules and names that users import; code behind them may move.

Whoever adds, renames or removes one changes this list, and the changelog.
"""

import ast
import importlib
import json
import re

import pytest
from support.repository import ROOT

NAMES = {
    "diffusax": """
        AsymmetricAutoencoderKL AutoModel AutoPipelineForImage2Image AutoPipelineForInpainting
        AutoPipelineForText2Image AutoencoderKL AutoencoderKLFlux2 AutoencoderKLQwenImage
        AutoencoderKLQwenImage21 AutoencoderKLWan AutoencoderTiny CLIPImageProcessor CLIPModel
        CLIPTextModel
        CLIPTextModelWithProjection CLIPTokenizer CLIPVisionModel CLIPVisionModelWithProjection
        ControlNetModel DDIMInverseScheduler DDIMPipeline DDIMScheduler DDPMPipeline DDPMScheduler
        DEISMultistepScheduler DPMSolverMultistepInverseScheduler
        DPMSolverMultistepScheduler DPMSolverSDEScheduler DPMSolverSinglestepScheduler
        DeepCacheConfig DiffusionPipeline Dinov2Model
        EDMDPMSolverMultistepScheduler EDMEulerScheduler
        EulerAncestralDiscreteScheduler EulerDiscreteScheduler FirstBlockCacheConfig
        FlowMatchEulerDiscreteScheduler FlowMatchHeunDiscreteScheduler FlowMatchLCMScheduler
        Flux2KleinInpaintPipeline Flux2KleinKVPipeline Flux2KleinPipeline Flux2Transformer2DModel
        Flux3KleinInpaintPipeline Flux3KleinPipeline
        Flux3Transformer2DModel FluxControlNetModel FluxControlNetPipeline FluxFillPipeline
        FluxImg2ImgPipeline FluxInpaintPipeline FluxKontextPipeline FluxPipeline
        FluxTransformer2DModel HeunDiscreteScheduler ImagePipelineOutput
        KDPM2AncestralDiscreteScheduler KDPM2DiscreteScheduler Krea2EditPipeline Krea2Pipeline
        Krea2Transformer2DModel
        LCMScheduler LMSDiscreteScheduler LatentConsistencyModelImg2ImgPipeline
        LatentConsistencyModelPipeline MultiAdapter MultiControlNetModel PNDMScheduler
        Qwen2Tokenizer Qwen2VLImageProcessor Qwen2_5_VLForConditionalGeneration Qwen2_5_VLModel
        Qwen2VLProcessor Qwen2_5_VLProcessor
        Qwen2_5_VLTextModel Qwen2_5_VisionTransformerPretrainedModel Qwen3ForCausalLM Qwen3Model
        Qwen3VLForConditionalGeneration Qwen3VLModel Qwen3VLProcessor Qwen3VLTextModel
        Qwen3VLVisionModel QwenImage21Pipeline QwenImage21Transformer2DModel
        QwenImageEditPipeline QwenImageEditPlusPipeline QwenImageImg2ImgPipeline
        QwenImageInpaintPipeline QwenImagePipeline
        QwenImageTransformer2DModel RunningBatch
        SASolverScheduler StableDiffusionAdapterPipeline StableDiffusionControlNetImg2ImgPipeline
        StableDiffusionControlNetInpaintPipeline StableDiffusionControlNetPipeline
        StableDiffusionImg2ImgPipeline StableDiffusionInpaintPipeline
        StableDiffusionInstructPix2PixPipeline StableDiffusionPipeline
        StableDiffusionXLAdapterPipeline StableDiffusionXLControlNetImg2ImgPipeline
        StableDiffusionXLControlNetInpaintPipeline StableDiffusionXLControlNetPipeline
        StableDiffusionXLImg2ImgPipeline StableDiffusionXLInpaintPipeline
        StableDiffusionXLInstructPix2PixPipeline StableDiffusionXLPipeline T2IAdapter T5EncoderModel
        T5Tokenizer TCDScheduler TaylorSeerCacheConfig UMT5EncoderModel
        UNet2DConditionModel UNet2DModel
        UniPCMultistepScheduler ViTModel WanImageToVideoPipeline
        WanPipeline WanTransformer3DModel WanVACEPipeline WanVACETransformer3DModel
        WanVideoToVideoPipeline
        ZImageEditPipeline ZImageImg2ImgPipeline ZImageInpaintPipeline ZImagePipeline
        ZImageTransformer2DModel __version__ count_compilations initialize kernel_shapes load_image
        load_network int8_activations make_image_grid make_mesh pack_single_file resolve
        save_network
    """,
    "diffusax.samplers": """
        DDIMInverseScheduler DDIMScheduler DDPMScheduler DEISMultistepScheduler
        DPMSolverMultistepInverseScheduler DPMSolverMultistepScheduler
        DPMSolverSDEScheduler DPMSolverSinglestepScheduler EDMDPMSolverMultistepScheduler
        EDMEulerScheduler EulerAncestralDiscreteScheduler EulerDiscreteScheduler
        FlowMatchEulerDiscreteScheduler FlowMatchHeunDiscreteScheduler FlowMatchLCMScheduler
        HeunDiscreteScheduler KDPM2AncestralDiscreteScheduler KDPM2DiscreteScheduler LCMScheduler
        LMSDiscreteScheduler M1 P PNDMScheduler Row SAMPLER_CLASSES SAMPLER_NAMES SASolverScheduler
        SCHEDULERS SPACED_NAMES Schedule Scheduler StepDistribution Steps TCDScheduler Table
        UniPCMultistepScheduler X fitting_samplers init_state run sampler_name scheduler_from_config
        scheduler_from_function scheduler_from_name stack_tables step step_distribution
    """,
    "diffusax.training": """
        AVERAGES AutoencoderConfig AutoencoderValidationConfig Batch Batches CacheConfig
        CacheDataConfig CaptionedDataConfig ControlDataConfig ControlNetConfig
        ControlNetValidationConfig DataConfig DenoiserValidationConfig Draws DreamBoothConfig
        DreamBoothDataConfig EMAConfig EMAState EditDataConfig FineTuningOptimizerConfig
        ImageDataConfig InstructPix2PixConfig InstructPix2PixValidationConfig LoRAConfig
        OptimizerConfig Preempted Recipe TextToImageConfig TextToVideoConfig TextualInversionConfig
        TextualInversionDataConfig TextualInversionOptimizerConfig TimestepBiasConfig TrainConfig
        TrainState UnconditionalConfig UnconditionalValidationConfig ValidationConfig
        VideoDataConfig VideoValidationConfig autoencoder cache_latents controlnet copy_as_average
        dreambooth encode_pixels initial_state instruct_pix2pix make_average make_optimizer
        make_train_step read_config remove_snapshots_after text_to_image text_to_video
        textual_inversion to_yaml train unconditional update_ema write_snapshots
    """,
    "diffusax.serving": """
        Catalogue Client Control Engine EngineSettings Generation WebSettings application create_app
    """,
    "diffusax.offline": """
        Settings Stopped Summary generate generate_with_ray open_prompts
    """,
    "diffusax.torch": """
        CompileOptions NotTraceable compile from_torch restore to_jax
    """,
    "diffusax.interop.flax": """
        FlaxAutoencoderKL FlaxCLIPTextModel FlaxCLIPTextModelWithProjection FlaxControlNetModel
        FlaxDDIMScheduler FlaxDDPMScheduler FlaxDPMSolverMultistepScheduler FlaxDiffusionPipeline
        FlaxEulerDiscreteScheduler FlaxKarrasVeScheduler FlaxLMSDiscreteScheduler FlaxModelMixin
        FlaxPNDMScheduler FlaxSchedulerMixin FlaxScoreSdeVeScheduler
        FlaxStableDiffusionControlNetPipeline FlaxStableDiffusionImg2ImgPipeline
        FlaxStableDiffusionInpaintPipeline FlaxStableDiffusionInstructPix2PixPipeline
        FlaxStableDiffusionPipeline FlaxStableDiffusionXLPipeline FlaxUNet2DConditionModel
    """,
    "diffusax.callbacks": """
        CallbackConfig MultiPipelineCallbacks PipelineCallback SDCFGCutoffCallback
        SDXLCFGCutoffCallback SDXLControlnetCFGCutoffCallback
    """,
    "diffusax.evaluation": """
        Aesthetic CLIP DINO EditScores EditSettings Edits Gaussian HPSv2 ImageScores Inception Mean
        Measures PickScore clip_score direction_similarity evaluate_edits evaluate_images
        frechet_distance image_similarity load_statistics pixel_distances save_statistics statistics
        text_image_similarity
    """,
    "diffusax.models": """
        AsymmetricAutoencoderKL AsymmetricAutoencoderKLConfig AutoencoderKL AutoencoderKLConfig
        AutoencoderKLFlux2 AutoencoderKLFlux2Config AutoencoderKLQwenImage AutoencoderKLQwenImage21
        AutoencoderKLQwenImage21Config AutoencoderKLQwenImageConfig AutoencoderKLWan
        AutoencoderKLWanConfig AutoencoderTiny
        AutoencoderTinyConfig CLIPConfig CLIPModel CLIPTextConfig CLIPTextModel
        CLIPTextModelWithProjection CLIPVisionConfig CLIPVisionModel CLIPVisionModelWithProjection
        ControlNetConfig ControlNetModel Dinov2Config Dinov2Model
        Flux2Transformer2DConfig Flux2Transformer2DModel
        Flux3Transformer2DConfig Flux3Transformer2DModel FluxControlNetConfig FluxControlNetModel
        FluxTransformer2DConfig FluxTransformer2DModel Krea2Transformer2DConfig
        Krea2Transformer2DModel MODELS Model Network Params Qwen2_5_VLConfig
        Qwen2_5_VLForConditionalGeneration Qwen2_5_VLModel Qwen2_5_VLTextConfig Qwen2_5_VLTextModel
        Qwen2_5_VLVisionConfig Qwen2_5_VisionTransformerPretrainedModel
        Qwen3Config Qwen3ForCausalLM Qwen3Model
        Qwen3VLConfig Qwen3VLForConditionalGeneration Qwen3VLModel Qwen3VLTextConfig
        Qwen3VLTextModel Qwen3VLVisionConfig Qwen3VLVisionModel QwenImage21Transformer2DConfig
        QwenImage21Transformer2DModel QwenImageTransformer2DConfig QwenImageTransformer2DModel
        T2IAdapter T2IAdapterConfig T5Config T5EncoderModel
        UMT5Config UMT5EncoderModel
        TENSOR_RULES UNet2DConditionConfig UNet2DConditionModel UNet2DConfig UNet2DModel
        ViTConfig ViTModel WanTransformer3DConfig WanTransformer3DModel
        WanVACETransformer3DConfig WanVACETransformer3DModel
        ZImageTransformer2DConfig ZImageTransformer2DModel initialize
    """,
    "diffusax.pipelines": """
        Family QwenImage21Pipeline STABLE_DIFFUSION documented noise_source text_to_image
    """,
    "diffusax.utils": """
        BaseOutput PIL_INTERPOLATION captioned contact_sheet deprecate export_to_gif export_to_video
        get_logger labelled_grid load_image load_video logging make_image_grid numpy_to_pil
        pt_to_pil
        randn_tensor
    """,
    "diffusax.image_processor": """
        CLIPImageProcessor IPAdapterMaskProcessor PipelineImageInput VaeImageProcessor
    """,
    "diffusax.optimization": """
        LearningRate SchedulerType get_constant_schedule get_constant_schedule_with_warmup
        get_cosine_schedule_with_warmup get_cosine_with_hard_restarts_schedule_with_warmup
        get_linear_schedule_with_warmup get_piecewise_constant_schedule
        get_polynomial_decay_schedule_with_warmup get_scheduler
    """,
    "diffusax.training_utils": """
        EMAModel cast_training_params compute_density_for_timestep_sampling
        compute_loss_weighting_for_sd3 compute_snr free_memory set_seed
    """,
}
MODULES = {module: set(names.split()) for module, names in NAMES.items()}


@pytest.mark.parametrize("module", MODULES)
def test_a_documented_module_has_its_names_and_exports_no_others(module):
    found = importlib.import_module(module)
    assert [name for name in MODULES[module] if not hasattr(found, name)] == []
    exported = set(getattr(found, "__all__", ()))
    assert exported <= MODULES[module] | MODULES["diffusax"]


def blocks():
    """The Python code of the pages, notebooks and examples, by where it stands."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for code in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S):
            yield page, code
    for page in sorted((ROOT / "docs").rglob("*.ipynb")):
        for cell in json.loads(page.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield page, "".join(cell["source"])
    for script in sorted((ROOT / "examples").rglob("*.py")):
        yield script, script.read_text("utf-8")


def imported(code):
    """The modules of diffusax that code imports, each with the names it takes from it."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((one.name, []) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [one.name for one in node.names]


def test_pages_and_examples_import_from_documented_modules_alone():
    deeper = []
    for place, code in blocks():
        for module, names in imported(code):
            if module.split(".")[0] != "diffusax":
                continue
            known = MODULES.get(module, set())
            if module not in MODULES or any(
                name not in known and f"{module}.{name}" not in MODULES for name in names
            ):
                deeper.append((str(place.relative_to(ROOT)), module, names))
    assert deeper == []
