"""The table of families, by what they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.zoo.families import (
    CLASSES,
    FFN,
    HEADS,
    HIDDEN,
    IMAGE,
    KV_HEADS,
    PATCH,
    TWO,
    VOCAB,
    Config,
    EachLayer,
    Family,
    L,
)  # fmt: skip

# -- sizes, by the names that configs give them -----------------------------------------------------

_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_MODEL = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": L,
    "num_attention_heads": HEADS, "max_position_embeddings": 64,
}  # fmt: skip
_MHA: Config = {**_MODEL, **_ENDS}
_GQA: Config = {**_MHA, "num_key_value_heads": KV_HEADS}
_WIDE: Config = {**_GQA, "head_dim": 10}  # heads together are wider than the hidden dim
_BERT: Config = {**_MODEL, "pad_token_id": 0}
_GPT = {
    "n_embd": HIDDEN, "n_layer": L, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": 64, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_NEOX = {**_MODEL, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
_BART = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "encoder_layers": L, "decoder_layers": L, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": FFN, "decoder_ffn_dim": 20, "max_position_embeddings": 64,
    "use_cache": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 5, "d_ff": FFN, "num_layers": L, "num_decoder_layers": L,
    "num_heads": HEADS, "use_cache": False, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}  # fmt: skip
_VIT = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": L, "num_attention_heads": HEADS,
    "image_size": IMAGE, "patch_size": PATCH, "num_channels": 3, "num_labels": CLASSES,
}  # fmt: skip
_CLIP_TEXT = {**_MODEL, "eos_token_id": 2, "projection_dim": 10}
_SOUND = {
    **_BERT, "conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [4, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
}  # fmt: skip
_MLA = {
    **_MHA, "num_key_value_heads": HEADS, "q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "first_k_dense_replace": 8, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip
_ALTERNATING = {
    "num_hidden_layers": TWO, "sliding_window": 4, "layer_types": EachLayer(["sliding_attention", "full_attention"]),
}  # fmt: skip

# -- placements that families share -----------------------------------------------------------------

_QKV = "model.layers.*.self_attn.{q,k,v}_proj"
_O = "model.layers.*.self_attn.o_proj"
_GATED = f"{_QKV} model.layers.*.mlp.{{gate,up}}_proj"
_ROWS = f"{_O} model.layers.*.mlp.down_proj"
_TWO = "model.layers.*.{input,post_attention}_layernorm model.norm"
_FOUR = "model.layers.*.{input,post_attention,pre_feedforward,post_feedforward}_layernorm model.norm"


def _decoder(name: str, family: str, sizes: Config, **more: Any) -> Family:
    """A decoder with the names of Llama's modules."""
    given = {"column": _GATED, "row": _ROWS, "vocab": "model.embed_tokens", "norms": _TWO}
    return replace(Family(name, f"{family}ForCausalLM", f"{family}Config", sizes, **given), **more)


def _encoder(name: str, family: str, sizes: Config = _BERT, *, at: str = "", **more: Any) -> Family:
    """An encoder with the names of BERT's modules, under ``at``."""
    layer = f"{at or name}.encoder.layer.*"
    given = {
        "column": f"{layer}.attention.self.{{query,key,value}} {layer}.intermediate.dense",
        "row": f"{layer}.{{attention.output,output}}.dense",
        "vocab": f"{at or name}.embeddings.word_embeddings",
        "norms": f"{layer}.{{attention.output,output}}.LayerNorm",
    }
    return replace(Family(name, f"{family}ForMaskedLM", f"{family}Config", sizes, **given), **more)


def _translator(name: str, family: str, **more: Any) -> Family:
    """An encoder and a decoder with the names of BART's modules."""
    parts = "model.{encoder,decoder}.layers.*"
    attention = f"{parts}.self_attn.{{q,k,v}}_proj model.decoder.layers.*.encoder_attn.{{q,k,v}}_proj"
    given = {
        "column": f"{attention} {parts}.fc1",
        "row": f"{parts}.self_attn.out_proj model.decoder.layers.*.encoder_attn.out_proj {parts}.fc2",
        "vocab": "model.shared",
        "norms": (
            "model.encoder.layers.*.{self_attn,final}_layer_norm "
            "model.decoder.layers.*.{self_attn,encoder_attn,final}_layer_norm@tgt"
        ),
    }
    made = Family(name, f"{family}ForConditionalGeneration", f"{family}Config", _BART, "source and target", **given)
    return replace(made, **more)


def _t5(name: str, family: str, **more: Any) -> Family:
    parts = "{encoder,decoder}.block.*.layer"
    given = {
        "column": (
            f"{parts}.0.SelfAttention.{{q,k,v}} decoder.block.*.layer.1.EncDecAttention.{{q,k,v}} "
            "encoder.block.*.layer.1.DenseReluDense.wi decoder.block.*.layer.2.DenseReluDense.wi"
        ),
        "row": (
            f"{parts}.0.SelfAttention.o decoder.block.*.layer.1.EncDecAttention.o "
            "encoder.block.*.layer.1.DenseReluDense.wo decoder.block.*.layer.2.DenseReluDense.wo"
        ),
        "vocab": "shared",
        "norms": "encoder.block.*.layer.*.layer_norm decoder.block.*.layer.*.layer_norm@tgt",
    }
    made = Family(name, f"{family}ForConditionalGeneration", f"{family}Config", _T5, "source and target", **given)
    return replace(made, **more)


def _vision(name: str, model: str, config: str, layer: str, sizes: Config = _VIT, **more: Any) -> Family:
    given = {
        "column": f"{layer}.attention.{{q,k,v}}_proj {layer}.mlp.fc1",
        "row": f"{layer}.attention.o_proj {layer}.mlp.fc2",
        "given": "image and class",
    }
    return replace(Family(name, model, config, sizes, **given), **more)


def _clip(name: str, model: str, config: str, sizes: Config, layer: str, **more: Any) -> Family:
    given = {
        "column": f"{layer}.self_attn.{{q,k,v}}_proj {layer}.mlp.fc1",
        "row": f"{layer}.self_attn.out_proj {layer}.mlp.fc2",
    }
    return replace(Family(name, model, config, sizes, **given), **more)


_DECODERS = (
    _decoder("llama", "Llama", _GQA, given="embeddings", vocab="lm_head"),
    _decoder("qwen2", "Qwen2", _GQA),
    _decoder("qwen3", "Qwen3", _WIDE),
    _decoder("mistral", "Mistral", {**_GQA, "sliding_window": 5}),
    _decoder("ministral", "Ministral", {**_WIDE, **_ALTERNATING}),
    _decoder("gemma", "Gemma", {**_WIDE, "num_key_value_heads": 4}),
    _decoder("gemma2", "Gemma2", {**_WIDE, **_ALTERNATING}, norms=_FOUR),
    _decoder(
        "gemma3", "Gemma3", {**_WIDE, **_ALTERNATING}, config="Gemma3TextConfig", norms=_FOUR,
    ),
    _decoder("olmo", "Olmo", _GQA),
    _decoder(
        "olmo2", "Olmo2", _GQA, norms="model.layers.*.post_{attention,feedforward}_layernorm model.norm",
        more="param model.layers.*.self_attn.{q,k}_norm.weight : Shard(0) @ tp",
    ),
    _decoder("granite", "Granite", _GQA),
    _decoder("smollm3", "SmolLM3", {**_GQA, "num_hidden_layers": TWO, "no_rope_layers": EachLayer([1, 0])}),
    _decoder(
        "exaone4", "Exaone4", {**_WIDE, **_ALTERNATING, "sliding_window_pattern": 2},
        norms="model.layers.*.post_{attention,feedforward}_layernorm model.norm",
    ),
    _decoder("helium", "Helium", {**_GQA, "head_dim": 6}),
    _decoder("hunyuan", "HunYuanDenseV1", {**_WIDE}),
    _decoder("ernie 4.5", "Ernie4_5", {**_WIDE, "use_bias": True}),
    _decoder("seed oss", "SeedOss", _WIDE),
    _decoder("nemotron", "Nemotron", _GQA, column=f"{_QKV} model.layers.*.mlp.up_proj"),
    _decoder("arcee", "Arcee", _WIDE, column=f"{_QKV} model.layers.*.mlp.up_proj"),
    _decoder("apertus", "Apertus", _WIDE, column=f"{_QKV} model.layers.*.mlp.up_proj",
             norms="model.layers.*.{attention,feedforward}_layernorm model.norm"),
    _decoder("diffllama", "DiffLlama", {**_GQA, "num_hidden_layers": TWO}),
    _decoder("starcoder2", "Starcoder2", _GQA, column=f"{_QKV} model.layers.*.mlp.c_fc",
             row=f"{_O} model.layers.*.mlp.c_proj"),
    _decoder("lfm2", "Lfm2", {**_GQA, "num_hidden_layers": TWO, "layer_types": EachLayer(["conv", "full_attention"])},
             column="model.layers.*.self_attn.{q,k,v}_proj model.layers.*.feed_forward.w{1,3}",
             row="model.layers.*.self_attn.out_proj model.layers.*.feed_forward.w2",
             norms="model.layers.*.{operator,ffn}_norm"),
    Family(
        "opt", "OPTForCausalLM", "OPTConfig", {**_MHA, "ffn_dim": FFN, "word_embed_proj_dim": HIDDEN},
        column="model.decoder.layers.*.self_attn.{q,k,v}_proj model.decoder.layers.*.fc1",
        row="model.decoder.layers.*.self_attn.out_proj model.decoder.layers.*.fc2",
        vocab="model.decoder.embed_tokens", norms="model.decoder.layers.*.{self_attn,final}_layer_norm",
    ),
    Family(
        "xglm", "XGLMForCausalLM", "XGLMConfig",
        {"vocab_size": VOCAB, "d_model": HIDDEN, "ffn_dim": FFN, "num_layers": L, "attention_heads": HEADS,
         "max_position_embeddings": 64, "use_cache": False},
        column="model.layers.*.self_attn.{q,k,v}_proj model.layers.*.fc1",
        row="model.layers.*.self_attn.out_proj model.layers.*.fc2",
        vocab="model.embed_tokens", norms="model.layers.*.{self_attn,final}_layer_norm",
    ),
    Family(
        "gpt neo", "GPTNeoForCausalLM", "GPTNeoConfig",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": TWO, "attention_types": [[["global", "local"], L]],
         "num_heads": HEADS, "intermediate_size": FFN, "window_size": 4, "max_position_embeddings": 64,
         "use_cache": False, "bos_token_id": 0, "eos_token_id": 0},
        column="transformer.h.*.attn.attention.{q,k,v}_proj transformer.h.*.mlp.c_fc",
        row="transformer.h.*.attn.attention.out_proj transformer.h.*.mlp.c_proj",
        vocab="transformer.wte", norms="transformer.h.*.ln_{1,2} transformer.ln_f",
    ),
    replace(
        _decoder("frozen llama", "Llama", _GQA), trained=("o_proj", "input_layernorm", "lm_head"),
    ),
)  # fmt: skip

_PARALLEL = (  # attention and feed-forward side by side on one residual
    _decoder("cohere", "Cohere", _GQA, norms="model.layers.*.input_layernorm model.norm"),
    _decoder("cohere2", "Cohere2", {**_GQA, **_ALTERNATING}, norms="model.layers.*.input_layernorm model.norm"),
    _decoder(
        "phi", "Phi", {**_MHA, "partial_rotary_factor": 0.34}, column=f"{_QKV} model.layers.*.mlp.fc1",
        row="model.layers.*.self_attn.dense model.layers.*.mlp.fc2",
        norms="model.layers.*.input_layernorm model.final_layernorm",
    ),
    _decoder("stablelm", "StableLm", {**_GQA, "partial_rotary_factor": 0.34, "use_parallel_residual": True},
             norms="model.layers.*.input_layernorm model.norm"),
    Family(
        "gptj", "GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 2, "n_inner": FFN},
        column="transformer.h.*.attn.{q,k,v}_proj transformer.h.*.mlp.fc_in",
        row="transformer.h.*.attn.out_proj transformer.h.*.mlp.fc_out",
        vocab="transformer.wte", norms="transformer.h.*.ln_1 transformer.ln_f",
    ),
)  # fmt: skip

_FUSED = (  # one weight for what is several elsewhere
    Family(
        "gpt2", "GPT2LMHeadModel", "GPT2Config", {**_GPT, "n_inner": FFN, "loss_type": "ForCausalLM"},
        column="transformer.h.*.attn.c_attn transformer.h.*.mlp.c_fc",
        row="transformer.h.*.{attn,mlp}.c_proj", vocab="transformer.wte",
        norms="transformer.h.*.ln_{1,2} transformer.ln_f",
    ),
    Family(
        "gpt neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_NEOX, "rotary_pct": 0.34},
        column="gpt_neox.layers.*.attention.query_key_value gpt_neox.layers.*.mlp.dense_h_to_4h",
        row="gpt_neox.layers.*.attention.dense gpt_neox.layers.*.mlp.dense_4h_to_h", vocab="gpt_neox.embed_in",
        norms="gpt_neox.layers.*.{input,post_attention}_layernorm gpt_neox.final_layer_norm",
    ),
    Family(
        "persimmon", "PersimmonForCausalLM", "PersimmonConfig", {**_MHA, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.34}},
        column="model.layers.*.self_attn.query_key_value model.layers.*.mlp.dense_h_to_4h",
        row="model.layers.*.self_attn.dense model.layers.*.mlp.dense_4h_to_h", vocab="model.embed_tokens",
        norms="model.layers.*.{input,post_attention}_layernorm model.final_layernorm",
    ),
    Family(
        "mpt", "MptForCausalLM", "MptConfig",
        {"vocab_size": VOCAB, "d_model": HIDDEN, "n_layers": L, "n_heads": HEADS, "expansion_ratio": 2,
         "max_seq_len": 64, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0},
        column="transformer.blocks.*.attn.Wqkv transformer.blocks.*.ffn.up_proj",
        row="transformer.blocks.*.attn.out_proj transformer.blocks.*.ffn.down_proj", vocab="transformer.wte",
        norms="transformer.blocks.*.norm_{1,2} transformer.norm_f",
    ),
    Family(
        "codegen", "CodeGenForCausalLM", "CodeGenConfig", {**_GPT, "rotary_dim": 2, "n_inner": FFN},
        column="transformer.h.*.mlp.fc_in", row="transformer.h.*.mlp.fc_out", vocab="transformer.wte",
        norms="transformer.h.*.ln_1 transformer.ln_f",
    ),
    _decoder(
        "phi3", "Phi3", {**_GQA, "partial_rotary_factor": 1.0},
        column="model.layers.*.self_attn.qkv_proj model.layers.*.mlp.gate_up_proj",
    ),
    _decoder("glm", "Glm", {**_GQA, "head_dim": 8}, column=f"{_QKV} model.layers.*.mlp.gate_up_proj"),
    _decoder(
        "glm4", "Glm4", {**_GQA, "head_dim": 8}, column=f"{_QKV} model.layers.*.mlp.gate_up_proj",
        norms="model.layers.*.{input_layernorm,post_attention_layernorm,post_self_attn_layernorm,post_mlp_layernorm}",
    ),
    Family(
        "falcon", "FalconForCausalLM", "FalconConfig",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": L, "num_attention_heads": HEADS,
         "num_kv_heads": KV_HEADS, "new_decoder_architecture": True, "use_cache": False, "bos_token_id": 0,
         "eos_token_id": 0},
        column="transformer.h.*.self_attention.query_key_value transformer.h.*.mlp.dense_h_to_4h",
        row="transformer.h.*.self_attention.dense transformer.h.*.mlp.dense_4h_to_h",
        vocab="transformer.word_embeddings", norms="transformer.h.*.ln_{attn,mlp} transformer.ln_f",
    ),
    Family(
        "modernbert", "ModernBertForMaskedLM", "ModernBertConfig",
        {**_BERT, "num_hidden_layers": TWO, "global_attn_every_n_layers": 2, "local_attention": 4},
        column="model.layers.*.attn.Wqkv model.layers.*.mlp.Wi", row="model.layers.*.{attn,mlp}.Wo",
        vocab="model.embeddings.tok_embeddings", norms="model.layers.*.mlp_norm model.final_norm",
    ),
    Family(
        "bloom", "BloomForCausalLM", "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": L, "n_head": HEADS, "use_cache": False},
        refused=("PLC407", "the backward of the autograd.Function 'GeLUFunction' cannot be captured"),
    ),
)  # fmt: skip

_LATENT = (  # keys and values from one latent vector, and one rotated key for all heads
    _decoder(
        "deepseek v3", "DeepseekV3", _MLA, column=f"model.layers.*.self_attn.{{q,kv}}_b_proj {_GATED.split()[1]}",
    ),
    _decoder(
        "deepseek v2", "DeepseekV2", {**_MLA, "q_lora_rank": None},
        column=f"model.layers.*.self_attn.{{q_proj,kv_b_proj}} {_GATED.split()[1]}",
    ),
    _decoder(
        "minicpm3", "MiniCPM3", _MLA, column=f"model.layers.*.self_attn.{{q,kv}}_b_proj {_GATED.split()[1]}",
    ),
)  # fmt: skip

_ENCODERS = (
    _encoder("bert", "Bert"),
    _encoder("roberta", "Roberta"),
    _encoder("electra", "Electra", {**_BERT, "embedding_size": 10}),
    _encoder("megatron bert", "MegatronBert", at="bert",
             norms="bert.encoder.layer.*.{attention.ln,ln} bert.encoder.ln"),
    _encoder("roformer", "RoFormer", {**_BERT, "embedding_size": HIDDEN}),
    _encoder("esm", "Esm", {**_BERT, "position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 4},
             norms="esm.encoder.layer.*.attention.LayerNorm esm.encoder.layer.*.LayerNorm"),
    _encoder(
        "deberta v2", "DebertaV2", {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                                   "position_buckets": 8, "share_att_key": True, "position_biased_input": False,
                                   "norm_rel_ebd": "layer_norm"},
        at="deberta",
        column=("deberta.encoder.layer.*.attention.self.{query,key,value}_proj "
                "deberta.encoder.layer.*.intermediate.dense"),
    ),
    Family(
        "distilbert", "DistilBertForMaskedLM", "DistilBertConfig",
        {"vocab_size": VOCAB, "dim": HIDDEN, "hidden_dim": FFN, "n_layers": L, "n_heads": HEADS,
         "max_position_embeddings": 64},
        column="distilbert.transformer.layer.*.attention.{q,k,v}_lin distilbert.transformer.layer.*.ffn.lin1",
        row="distilbert.transformer.layer.*.attention.out_lin distilbert.transformer.layer.*.ffn.lin2",
        vocab="distilbert.embeddings.word_embeddings",
        norms="distilbert.transformer.layer.*.{sa,output}_layer_norm",
    ),
    Family(
        "albert", "AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 10, "num_hidden_layers": TWO},
        column="albert.**.attention.{query,key,value} albert.**.ffn",
        row="albert.**.attention.dense albert.**.ffn_output",
        vocab="albert.embeddings.word_embeddings", norms="albert.**.full_layer_layer_norm",
    ),
    Family(
        "mpnet", "MPNetForMaskedLM", "MPNetConfig", _BERT,
        column="mpnet.encoder.layer.*.attention.attn.{q,k,v} mpnet.encoder.layer.*.intermediate.dense",
        row="mpnet.encoder.layer.*.attention.attn.o mpnet.encoder.layer.*.output.dense",
        vocab="mpnet.embeddings.word_embeddings",
        norms="mpnet.encoder.layer.*.attention.LayerNorm mpnet.encoder.layer.*.output.LayerNorm",
        more="param mpnet.encoder.relative_attention_bias.weight : Shard(hidden) @ tp",
    ),
    Family(
        "fnet", "FNetForMaskedLM", "FNetConfig", _BERT, column="fnet.encoder.layer.*.intermediate.dense",
        row="fnet.encoder.layer.*.output.dense", vocab="fnet.embeddings.word_embeddings",
    ),
    Family("xlnet", "XLNetLMHeadModel", "XLNetConfig",
           {"vocab_size": VOCAB, "d_model": HIDDEN, "n_layer": L, "n_head": HEADS, "d_inner": FFN,
            "use_mems_train": False},
           column="transformer.layer.*.ff.layer_1", row="transformer.layer.*.ff.layer_2",
           vocab="transformer.word_embedding"),
    Family("deberta", "DebertaForMaskedLM", "DebertaConfig",
           {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
           refused=("PLC407", "a number is taken out of a tensor")),
    Family("longformer", "LongformerForMaskedLM", "LongformerConfig", {**_BERT, "attention_window": [4]},
           refused=("PLC401", "branches on the values of a tensor")),
)  # fmt: skip

_TRANSLATORS = (
    _translator("bart", "Bart"),
    _translator("mbart", "MBart"),
    _translator("pegasus", "Pegasus"),
    _translator("m2m 100", "M2M100"),
    _t5("t5", "T5"),
    _t5("umt5", "UMT5", column=(
        "{encoder,decoder}.block.*.layer.0.SelfAttention.{q,k,v} decoder.block.*.layer.1.EncDecAttention.{q,k,v} "
        "**.wi_{0,1}")),
)  # fmt: skip

_VISION = (
    _vision("vit", "ViTForImageClassification", "ViTConfig", "vit.layers.*"),
    _vision("deit", "DeiTForImageClassification", "DeiTConfig", "deit.layers.*"),
    _vision("dinov2", "Dinov2ForImageClassification", "Dinov2Config", "dinov2.encoder.layer.*",
            {**_VIT, "mlp_ratio": 2}),
    _vision("dinov3", "DINOv3ViTModel", "DINOv3ViTConfig", "**.layer.*",
            {**_VIT, "hidden_size": 64, "pos_embed_rescale": None}, given="image",
            column="**.layer.*.attention.{q,k,v}_proj **.layer.*.mlp.up_proj",
            row="**.layer.*.attention.o_proj **.layer.*.mlp.down_proj"),
    _vision("beit", "BeitForImageClassification", "BeitConfig", "beit.layers.*", {**_VIT, "drop_path_rate": 0.0}),
    _vision("vivit", "VivitForVideoClassification", "VivitConfig", "vivit.layers.*",
            {**_VIT, "num_frames": 4, "tubelet_size": [2, 4, 4]}, given="frames and class"),
    _clip("clip vision", "CLIPVisionModelWithProjection", "CLIPVisionConfig", {**_VIT, "projection_dim": 10},
          "vision_model.encoder.layers.*", given="image"),
    _clip("clip", "CLIPModel", "CLIPConfig",
          {"text_config": _CLIP_TEXT, "vision_config": {**_VIT, "projection_dim": 10}, "projection_dim": 10},
          "{text,vision}_model.encoder.layers.*", given="text and image",
          norms="text_model.encoder.layers.*.layer_norm{1,2}"),
    _clip("siglip", "SiglipVisionModel", "SiglipVisionConfig", _VIT, "**.layers.*", given="image"),
    _clip("llava", "LlavaForConditionalGeneration", "LlavaConfig",
          {"text_config": {"model_type": "llama", **_GQA},
           "vision_config": {"model_type": "clip_vision_model", **_VIT, "projection_dim": 10}, "image_token_index": 3,
           "image_seq_length": 9, "vision_feature_layer": -1},
          "**.vision_tower.**.layers.*", given="image in text"),
    _clip("paligemma", "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
          {"text_config": {"model_type": "gemma", **_WIDE},
           "vision_config": {"model_type": "siglip_vision_model", **_VIT}, "image_token_index": 3,
           "projection_dim": HIDDEN},
          "**.vision_tower.**.layers.*", given="image in typed text"),
    Family("convnext", "ConvNextForImageClassification", "ConvNextConfig",
           {"hidden_sizes": [8, 12], "depths": [1, 1], "patch_size": 2, "num_stages": 2, "num_labels": CLASSES,
            "drop_path_rate": 0.0},
           "16 by 16 and class", column="convnext.**.pwconv1", row="convnext.**.pwconv2"),
    Family("swin", "SwinForImageClassification", "SwinConfig",
           {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [4, 4], "window_size": 4,
            "num_labels": CLASSES, "drop_path_rate": 0.0},
           "16 by 16 and class", column="swin.**.{q,k,v}_proj swin.**.fc1", row="swin.**.{o_proj,fc2}",
           more="param swin.**.relative_position_bias_table : Shard(1) @ tp"),
    Family("segformer", "SegformerForImageClassification", "SegformerConfig",
           {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [4, 4], "mlp_ratios": [2, 2],
            "num_labels": CLASSES, "drop_path_rate": 0.0},
           "16 by 16 and class", column="segformer.**.{q,k,v}_proj", row="segformer.**.o_proj"),
    Family("resnet", "ResNetForImageClassification", "ResNetConfig",
           {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "num_labels": CLASSES},
           "16 by 16 and class", refused=("PLC407", "'batch_norm' keeps running statistics")),
    Family("vit mae", "ViTMAEModel", "ViTMAEConfig", _VIT, "image", refused=("PLC407", "'rand' draws random numbers")),
)  # fmt: skip

_AUDIO = (
    _translator("whisper", "Whisper", sizes={
        **_BART, "num_mel_bins": 6, "max_source_positions": 12, "max_target_positions": 32, "suppress_tokens": None,
        "begin_suppress_tokens": None}, given="spectrum and target", vocab="model.decoder.embed_tokens", norms=""),
    Family("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", _SOUND, "sound",
           column="encoder.layers.*.attention.{q,k,v}_proj encoder.layers.*.feed_forward.intermediate_dense",
           row="encoder.layers.*.attention.out_proj encoder.layers.*.feed_forward.output_dense"),
    Family("hubert", "HubertModel", "HubertConfig", {**_SOUND, "feat_extract_norm": "layer"}, "sound",
           column="encoder.layers.*.attention.{q,k,v}_proj encoder.layers.*.feed_forward.intermediate_dense",
           row="encoder.layers.*.attention.out_proj encoder.layers.*.feed_forward.output_dense"),
    _vision("ast", "ASTForAudioClassification", "ASTConfig", "audio_spectrogram_transformer.layers.*",
            {**_VIT, "max_length": 12, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
            given="spectrum and class"),
    Family("wav2vec2 ctc", "Wav2Vec2ForCTC", "Wav2Vec2Config", _SOUND, "sound and labels",
           refused=("PLC401", "branches on the values of a tensor")),
    Family("patchtst", "PatchTSTForPrediction", "PatchTSTConfig",
           {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": L,
            "d_model": HIDDEN, "num_attention_heads": HEADS, "ffn_dim": FFN, "prediction_length": 4, "loss": "mse",
            "scaling": "mean", "norm_type": "layernorm"},
           "series", column="model.encoder.layers.*.self_attn.{q,k,v}_proj model.encoder.layers.*.ff.0",
           row="model.encoder.layers.*.self_attn.out_proj model.encoder.layers.*.ff.3"),
)  # fmt: skip

_ALIKE = {
    "arcee": "nemotron", "clip vision": "clip", "deit": "vit", "ernie 4.5": "qwen2", "glm": "glm4", "granite": "qwen2",
    "helium": "qwen2", "hubert": "wav2vec2", "hunyuan": "qwen3", "m2m 100": "mbart", "minicpm3": "deepseek v3",
    "ministral": "cohere2", "mistral": "qwen2", "pegasus": "mbart", "persimmon": "gpt neox", "roberta": "bert",
    "seed oss": "qwen2", "umt5": "t5", "vivit": "vit", "xglm": "opt",
}  # fmt: skip
_GROUPS = {
    "decoders": _DECODERS, "decoders with a parallel residual": _PARALLEL, "fused weights": _FUSED,
    "latent attention": _LATENT, "encoders": _ENCODERS, "encoder and decoder": _TRANSLATORS, "vision": _VISION,
    "sound and series": _AUDIO,
}  # fmt: skip
GROUPS = {
    title: tuple(replace(family, alike=_ALIKE.get(family.name, "")) for family in group)
    for title, group in _GROUPS.items()
}
FAMILIES = tuple(family for group in GROUPS.values() for family in group)
