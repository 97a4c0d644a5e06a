//! Converts Mixtral's tensor names to those of Qwen's models with experts.

/// Mixtral's names of the matrices of an expert.
const PARTS: [(&str, &str); 3] =
    [(".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")];

/// The canonical name of a tensor. Another name stays unchanged.
pub fn canonical(name: &str) -> String {
    let Some((layer, part)) = name.split_once(".block_sparse_moe.") else {
        return name.to_owned();
    };
    let rename = |part: String, (theirs, ours): &(&str, &str)| part.replace(theirs, ours);
    let part = PARTS.iter().fold(part.to_owned(), rename);
    format!("{layer}.mlp.{part}")
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn names_experts_and_routers() {
        for (theirs, ours) in [
            ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
            ("block_sparse_moe.experts.7.w1.weight", "mlp.experts.7.gate_proj.weight"),
            ("block_sparse_moe.experts.7.w2.weight", "mlp.experts.7.down_proj.weight"),
            ("block_sparse_moe.experts.7.w3.weight", "mlp.experts.7.up_proj.weight"),
            ("self_attn.q_proj.weight", "self_attn.q_proj.weight"),
        ] {
            let [theirs, ours] = [theirs, ours].map(|part| format!("model.layers.3.{part}"));
            assert_eq!(canonical(&theirs), ours);
        }
    }
}
