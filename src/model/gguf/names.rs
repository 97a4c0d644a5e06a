//! Converts GGUF's tensor names to Hugging Face's names.

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

/// Tensors with the matrices of all experts (`expert_stack`).
const STACKS: [(&str, &str); 4] = [
    ("ffn_gate_exps.weight", "mlp.experts.gate_proj"),
    ("ffn_up_exps.weight", "mlp.experts.up_proj"),
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj"),
];

/// The canonical name of a tensor. An unknown name stays unchanged.
pub fn canonical(name: &str) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".into(),
        "output_norm.weight" => return "model.norm.weight".into(),
        "output.weight" => return "lm_head.weight".into(),
        _ => {}
    }
    let layer = || {
        let (index, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        if let Some((_, theirs)) = STACKS.iter().find(|(ours, _)| *ours == rest) {
            return Some(format!("model.layers.{index}.{theirs}"));
        }
        let (part, kind) = rest.rsplit_once('.')?;
        let (_, theirs) = PARTS.iter().find(|(ours, _)| *ours == part)?;
        Some(format!("model.layers.{index}.{theirs}.{kind}"))
    };
    layer().unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn names_layers_and_ends() {
        assert_eq!(canonical("blk.12.attn_q.bias"), "model.layers.12.self_attn.q_proj.bias");
        assert_eq!(canonical("output.weight"), "lm_head.weight");
        assert_eq!(canonical("blk.0.ssm_a"), "blk.0.ssm_a");
        assert_eq!(canonical("blk.3.ffn_gate_inp.weight"), "model.layers.3.mlp.gate.weight");
        assert_eq!(canonical("blk.3.ffn_down_exps.weight"), "model.layers.3.mlp.experts.down_proj");
        assert_eq!(canonical("blk.3.ffn_down_exps.scale"), "blk.3.ffn_down_exps.scale");
    }
}
