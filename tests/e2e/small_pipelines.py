"""Tiny models of diffusers and peft with random weights, for clients in processes of their own."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

__all__ = ["ddpm", "equal", "llama", "lora", "stable_diffusion", "state", "unet"]

diffusers: Any = importlib.import_module("diffusers")  # its types are not complete


def unet(seed: int = 0) -> Any:
    """1.1 MB."""
    torch.manual_seed(seed)
    return diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def ddpm(seed: int = 0) -> Any:
    """A pipeline with one model."""
    return diffusers.DDPMPipeline(unet(seed), diffusers.DDPMScheduler())


def stable_diffusion(folder: Path, seed: int = 0) -> Any:
    """A pipeline with three models, of diffusers and of transformers; `folder` is for the files of its tokenizer."""
    torch.manual_seed(seed)
    denoiser = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        norm_num_groups=8,
        sample_size=16,
    )
    config = transformers.CLIPTextConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=8,
    )
    folder.mkdir(parents=True, exist_ok=True)
    words = ["<|startoftext|>", "<|endoftext|>", "a</w>", "b</w>", "a", "b"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return diffusers.StableDiffusionPipeline(
        vae=vae,
        unet=denoiser,
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(folder),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def llama(seed: int = 0) -> Any:
    """What adapters stand on."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def lora(base: Any, *names: str, **options: Any) -> Any:
    """A model with adapters of these names, none of which does nothing."""
    torch.manual_seed(1)
    first, *others = names or ("default",)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config, adapter_name=first)
    for name in others:
        model.add_adapter(name, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def state(thing: Any) -> dict[str, torch.Tensor]:
    """All tensors of a model, or of the models of a pipeline."""
    if not isinstance(thing, diffusers.DiffusionPipeline):
        return dict(thing.state_dict())
    models = {name: part for name, part in thing.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{name}/{key}": value for name, part in models.items() for key, value in part.state_dict().items()}


def equal(one: Any, other: Any) -> bool:
    """Whether two models, or pipelines, hold the same tensors, bit by bit."""
    a, b = state(one), state(other)
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
