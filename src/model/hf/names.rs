//! Converts the tensor names of architectures with names of their own: those of Mixtral to those of
//! Qwen's models with experts, those of Mamba-2 to those of Falcon-H1, and Falcon-H1's names of
//! other parts to those of Llama.

use crate::model::config::Architecture;

/// Mixtral's names of the matrices of an expert.
const MIXTRAL: [(&str, &str); 3] =
    [(".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")];
/// The first parts of Mamba-2's names.
const MAMBA2: [(&str, &str); 4] = [
    ("backbone.embeddings.", "model.embed_tokens."),
    ("backbone.embedding.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("backbone.layers.", "model.layers."),
];
/// The parts of its layers.
const MAMBA2_LAYER: [(&str, &str); 2] =
    [(".norm.weight", ".input_layernorm.weight"), (".mixer.", ".mamba.")];

/// The canonical name of a tensor. Another name stays unchanged.
pub fn canonical(name: String, architecture: Architecture) -> String {
    let renamed = match architecture {
        Architecture::Mixtral => name.split_once(".block_sparse_moe.").map(|(layer, part)| {
            let rename = |part: String, (theirs, ours): &(&str, &str)| part.replace(theirs, ours);
            format!("{layer}.mlp.{}", MIXTRAL.iter().fold(part.to_owned(), rename))
        }),
        Architecture::Mamba2 => mamba2(&name),
        Architecture::FalconH1 if name == "model.final_layernorm.weight" => {
            Some("model.norm.weight".to_owned())
        }
        Architecture::FalconH1 => Some(name.replace(".feed_forward.", ".mlp.")),
        _ => None,
    };
    renamed.unwrap_or(name)
}

fn mamba2(name: &str) -> Option<String> {
    let (theirs, ours) = MAMBA2.iter().find(|(theirs, _)| name.starts_with(theirs))?;
    let rest = &name[theirs.len()..];
    // Only a layer's own norm has this name behind the layer's number.
    let at = rest.find('.').filter(|_| *ours == "model.layers.").unwrap_or(rest.len());
    let (layer, part) = rest.split_at(at);
    let part = MAMBA2_LAYER
        .iter()
        .find_map(|(theirs, ours)| part.strip_prefix(theirs).map(|rest| format!("{ours}{rest}")));
    Some(match part {
        Some(part) => format!("{ours}{layer}{part}"),
        None => format!("{ours}{rest}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(canonical(theirs.clone(), Architecture::Mixtral), ours);
            assert_eq!(canonical(theirs.clone(), Architecture::Llama), theirs);
        }
    }

    #[test]
    fn names_the_tensors_of_recurrent_layers() {
        for (theirs, ours) in [
            ("backbone.embeddings.weight", "model.embed_tokens.weight"),
            ("backbone.embedding.weight", "model.embed_tokens.weight"),
            ("backbone.norm_f.weight", "model.norm.weight"),
            ("backbone.layers.12.norm.weight", "model.layers.12.input_layernorm.weight"),
            ("backbone.layers.3.mixer.norm.weight", "model.layers.3.mamba.norm.weight"),
            ("backbone.layers.3.mixer.A_log", "model.layers.3.mamba.A_log"),
            ("backbone.layers.3.other", "model.layers.3.other"),
            ("lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(canonical(theirs.to_owned(), Architecture::Mamba2), ours);
        }
    }
}
