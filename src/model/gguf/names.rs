//! Converts GGUF's tensor names to Hugging Face's names.

use crate::model::config::Architecture;

/// The tensor with the divisors of rotary frequencies. It is not a weight.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

const PARTS: [(&str, &str); 16] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// Norms of Gemma, which takes precedence over [`PARTS`].
const GEMMA_PARTS: [(&str, &str); 3] = [
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// Parts of recurrent layers.
const MAMBA_PARTS: [(&str, &str); 4] = [
    ("ssm_in", "mamba.in_proj"),
    ("ssm_conv1d", "mamba.conv1d"),
    ("ssm_norm", "mamba.norm"),
    ("ssm_out", "mamba.out_proj"),
];

/// Parts of Qwen3-Next, which take precedence over the others. Old files have `ssm_in` in place of
/// `attn_qkv` and `attn_gate`.
const NEXT_PARTS: [(&str, &str); 8] = [
    ("ssm_in", "linear_attn.in_proj_qkvz"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
];

/// Like [`WHOLE`], for Qwen3-Next.
const NEXT_WHOLE: [(&str, &str); 2] =
    [("ssm_a", "linear_attn.A_log"), ("ssm_dt.bias", "linear_attn.dt_bias")];

/// A part of Falcon-H1, which takes precedence over [`PARTS`].
const FALCON_PARTS: [(&str, &str); 1] = [("ffn_norm", "pre_ff_layernorm")];

/// Tensors of a layer without a kind at the end of their names, in one format or in both. The
/// converter writes a norm of Falcon-H1 without a kind.
const WHOLE: [(&str, &str); 4] = [
    ("ssm_a", "mamba.A_log"),
    ("ssm_d", "mamba.D"),
    ("ssm_dt.bias", "mamba.dt_bias"),
    ("ffn_norm", "pre_ff_layernorm.weight"),
];

/// Tensors with the matrices of all experts (`expert_stack`).
const STACKS: [(&str, &str); 4] = [
    ("ffn_gate_exps.weight", "mlp.experts.gate_proj"),
    ("ffn_up_exps.weight", "mlp.experts.up_proj"),
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj"),
];

/// Matrices of one expert.
const EXPERT_PARTS: [(&str, &str); 3] =
    [("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj")];

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The canonical name of a tensor. An unknown name stays unchanged.
pub fn canonical(name: &str, architecture: Architecture) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".into(),
        "output_norm.weight" => return "model.norm.weight".into(),
        "output.weight" => return "lm_head.weight".into(),
        _ => {}
    }
    let is_next = architecture == Architecture::Qwen3Next;
    let layer = || {
        let (index, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let whole = if is_next { &NEXT_WHOLE[..] } else { &WHOLE };
        if let Some((_, theirs)) = STACKS.iter().chain(whole).find(|(ours, _)| *ours == rest) {
            return Some(format!("model.layers.{index}.{theirs}"));
        }
        let (part, kind) = rest.rsplit_once('.')?;
        // Old files of Mixtral have a tensor for each expert.
        if let Some((part, expert)) = part.rsplit_once('.').filter(|(_, expert)| is_number(expert))
        {
            let (_, theirs) = EXPERT_PARTS.iter().find(|(ours, _)| *ours == part)?;
            return Some(format!("model.layers.{index}.mlp.experts.{expert}.{theirs}.{kind}"));
        }
        let own = match architecture {
            Architecture::Gemma3 => &GEMMA_PARTS[..],
            Architecture::Qwen3Next => &NEXT_PARTS,
            Architecture::FalconH1 => &FALCON_PARTS,
            _ => &[],
        };
        let parts = own.iter().chain(&PARTS).chain(&MAMBA_PARTS);
        let (_, theirs) = parts.into_iter().find(|(ours, _)| *ours == part)?;
        Some(format!("model.layers.{index}.{theirs}.{kind}"))
    };
    layer().unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama(name: &str) -> String {
        canonical(name, Architecture::Llama)
    }

    #[test]
    fn names_layers_and_ends() {
        assert_eq!(llama("blk.12.attn_q.bias"), "model.layers.12.self_attn.q_proj.bias");
        assert_eq!(llama("output.weight"), "lm_head.weight");
        assert_eq!(llama("blk.0.ssm_x"), "blk.0.ssm_x");
        assert_eq!(llama("blk.7.ssm_a"), "model.layers.7.mamba.A_log");
        assert_eq!(llama("blk.7.ssm_dt.bias"), "model.layers.7.mamba.dt_bias");
        assert_eq!(llama("blk.7.ssm_conv1d.bias"), "model.layers.7.mamba.conv1d.bias");
        assert_eq!(llama("blk.3.ffn_gate_inp.weight"), "model.layers.3.mlp.gate.weight");
        assert_eq!(llama("blk.3.ffn_down_exps.weight"), "model.layers.3.mlp.experts.down_proj");
        assert_eq!(llama("blk.3.ffn_down_exps.scale"), "blk.3.ffn_down_exps.scale");
        assert_eq!(
            llama("blk.0.ffn_norm.weight"),
            "model.layers.0.post_attention_layernorm.weight"
        );
        let expert = "model.layers.2.mlp.experts.7.down_proj.weight";
        assert_eq!(llama("blk.2.ffn_down.7.weight"), expert);
        assert_eq!(llama("blk.2.ffn_down.x.weight"), "blk.2.ffn_down.x.weight");
        for name in ["blk.5.ffn_norm", "blk.5.ffn_norm.weight"] {
            let found = canonical(name, Architecture::FalconH1);
            assert_eq!(found, "model.layers.5.pre_ff_layernorm.weight");
        }
        for (theirs, ours) in NEXT_PARTS {
            let found = canonical(&format!("blk.0.{theirs}.weight"), Architecture::Qwen3Next);
            assert_eq!(found, format!("model.layers.0.{ours}.weight"));
        }
        let found = canonical("blk.0.ssm_a", Architecture::Qwen3Next);
        assert_eq!(found, "model.layers.0.linear_attn.A_log");
        for (theirs, ours) in GEMMA_PARTS {
            let found = canonical(&format!("blk.0.{theirs}.weight"), Architecture::Gemma3);
            assert_eq!(found, format!("model.layers.0.{ours}.weight"));
        }
    }
}
