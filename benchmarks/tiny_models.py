"""Draw a tiny random model of any architecture of the installed transformers, by the names of its config's sizes."""

import re

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

TOKENS = {"pad": 0, "unk": 1, "bos": 2, "eos": 3, "decoder_start": 2, "forced_bos": 2, "forced_eos": 3}
NAMED = ("pad_token_id", "bos_token_id", "eos_token_id")  # texts end with the last
VOCABULARY, IMAGE, POSITIONS = 96, 32, 160
MOST = 6_000_000  # weights; a config with a size of an unknown name has more of them
DEPTH, GROUPS = "depth", "groups"  # the number of layers, and of heads for keys and values
# Names of sizes in configs, and their small values; the first pattern that matches the whole name decides.
SIZES = {
    r"type_vocab_size|num_channels|num_labels|pad_idx|.*stride|.*kernel_size|num_stages|.*_interval": None,
    r"vocab_size|.*_vocab_size(_base)?|vocab_size_.*|num_hash_buckets|.*hash_byte_group_vocab": VOCABULARY,
    r"image_size|input_size": IMAGE,
    r"patch_size": 4,
    r"first_k_dense_replace|num_dense_layers|.*_per_stack|n_group|topk_group|num_expert_group|expert_layer_offset": 1,
    r"num_kv_shared_layers|num_nextn_predict_layers|.*layer_offset": 0,
    r".*(experts?_per_tok(en)?|topk|top_k|moe_k|_period)": 2,
    r"num_shared_experts|n_shared_experts|moe_num_shared_experts": 1,
    r"(num|n|moe).*experts?|zero_expert_num": 4,
    r"qk_head_dim|mamba_(d_head|headdim|head_dim)": 16,
    r".*(head_dim|dim_head|d_head|d_kv|kv_channels|headdim|attention_head_size|linear_head_dim|rotary_dim|rank)": 8,
    r".*(key_value|kv).*heads?|linear_num_key_heads": GROUPS,
    r".*heads?|num_query_groups|.*groups_?": 4,
    r".*(intermediate|inner|ffn|ff|feed_forward|mlp).*(size|dim)?|mamba_d_ssm": 64,
    r"(.*_)?(hidden|hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|embedding_size|hidden_dim|emb_size|embedding_dim|"
    r"width|embd|latents|proj_size|output_size|hidden_size_.*|head_size|bottleneck_size)": 32,
    r".*(positions?|position_embeddings|seq_len|n_ctx|context_length|max_length|unit_embeddings|max_rel.*)": POSITIONS,
    r"num_.*layers|(n|num)_layers?|.*_layers|num_blocks|n_blocks|depth|num_self_attends_per_block": DEPTH,
    r".*(window|window_size|chunk_size|chunk_length|block_size|window_len)": 64,
}
ONES = r"depths|num_block_repeats|.*num_blocks|stage_numb_of_layers|num_(attention_)?heads|depth|block_sizes"  # lists
UNSET = {"head_dim": 8, "num_key_value_heads": GROUPS, "num_experts_per_tok": 2, "n_routed_experts": 4}
UNSET |= {"vocab_size": VOCABULARY}  # sizes that some configs leave to the checkpoint
EXTRA = {  # sizes that depend on each other
    "donut-swin": {"depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048]},
    "hiera": {"masked_unit_size": [4, 4], "num_query_pool": 1, "depths": [1, 1], "num_heads": [1, 2], "embed_dim": 8,
              "patch_size": [7, 7]},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6},
    "levit": {"patch_size": 16},
    "lilt": {"hidden_size": 48},
    "mamba2": {"head_dim": 16},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [4, 8, 8, 16, 16, 16, 32]},
    "reformer": {"axial_pos_embds": False},
    "swin": {"depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "t5": {"decoder_start_token_id": 0},
    "textnet": {"stem_out_channels": 8},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


def draw(name: str, kind: type, inputs: str, **more) -> tuple[PreTrainedModel, str | None]:
    """Return a tiny model and None, or the reason why its forward pass fails.

    Args:
        name: A `model_type` of transformers.
        kind: An auto class.
        inputs: `input_ids` or `pixel_values`.
        **more: Further arguments for its config.

    Raises:
        Exception: No sizes were found with which the model can be made. The class depends on the model.
    """
    made, problem = None, None
    for groups in (2, 4, 1):
        try:
            config = CONFIG_MAPPING[name]()
            config = CONFIG_MAPPING[name](**_small(config, groups) | more)
            config.use_cache = False
            config.architectures = config.architectures or []  # without it an auto class cannot choose among several
            with torch.device("meta"):
                count = kind.from_config(config).num_parameters()
            if count > MOST:
                raise ValueError(f"with small sizes it still has {count / 1e6:.0f} M weights")
            made = kind.from_config(config)
            _try(made, inputs)
            return made, None
        except Exception as error:
            problem = problem or error
    if made is None:
        raise problem
    return made, str(problem)


def _try(model: PreTrainedModel, inputs: str) -> None:
    """Run a forward pass."""
    images = torch.rand(2, 3, IMAGE, IMAGE)
    tokens = torch.tensor([[2, *range(10, 20), 3]] * 2)  # with an end token, which some heads look for
    with torch.no_grad():
        model.eval()(**{inputs: images if inputs == "pixel_values" else tokens})


def _small(config: PretrainedConfig, groups: int) -> dict:
    """Return arguments for a config with as few weights as its names allow, without dropout."""
    depth, deep = _depth(config), getattr(config, "num_hidden_layers", None)
    values = {}
    for name, value in config.to_dict().items():
        size = next((size for names, size in SIZES.items() if re.fullmatch(names, name)), None)
        size = {DEPTH: depth, GROUPS: groups}.get(size, size)
        if value is None and name in UNSET:
            values[name] = groups if UNSET[name] == GROUPS else UNSET[name]
        elif isinstance(value, dict) and isinstance(inner := getattr(config, name, None), PretrainedConfig):
            values[name] = _small(inner, groups) | {"model_type": inner.model_type}
        elif isinstance(value, list) and value:
            if "drop" in name:
                values[name] = [0.0] * len(value)
            elif len(value) == deep and deep > 4:
                values[name] = value[:depth]
            elif re.fullmatch(ONES, name):
                values[name] = [1] * len(value)
            elif all(isinstance(each, int) for each in value) and (size or min(value) >= 16) and "channel" not in name:
                values[name] = [min(each, size or max(8, each // 8)) for each in value]
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif re.search("drop|jitter", name):
            values[name] = type(value)(0)
        elif found := re.fullmatch(r"(.*?)_(token_id|token_index|index|token|id)", name):
            values[name] = TOKENS.get(found[1], 5)
        elif size is not None and value > 0 and isinstance(value, int):
            values[name] = min(value, size)
    values["classifier_dropout"] = 0.0  # transformers falls back to 0.1
    values |= EXTRA.get(config.model_type, {})
    return values | {name: TOKENS[name[:3]] for name in NAMED if hasattr(config, name)}


def _depth(config: PretrainedConfig) -> int:
    """Return the number of first layers that include every type of layer."""
    kinds = next((getattr(config, name, None) for name in ("layer_types", "layers_block_type")), None) or [""]
    return max(2, max(map(kinds.index, {*kinds})) + 1)
