//! Stored tensors with the matrices of all experts of a layer, one expert after the other. GGUF
//! files have them, and directories that transformers 5 saved with `save_original_format=False`.
//!
//! Invariants: the matrices of a stack cover its rows.

use super::config::ModelConfig;
use super::tensor::TensorPlace;

/// The end of a stack's name, and the matrices of one expert in it, in order.
const STACKS: [(&str, &[&str]); 4] = [
    ("gate_proj", &["gate_proj"]),
    ("up_proj", &["up_proj"]),
    ("gate_up_proj", &["gate_proj", "up_proj"]),
    ("down_proj", &["down_proj"]),
];

/// The prefix and the matrices of the stack `name`, such as `model.layers.0.mlp.experts.down_proj`.
fn parse(name: &str) -> Option<(&str, &'static [&'static str])> {
    let (prefix, end) = name.rsplit_once('.').filter(|(prefix, _)| prefix.ends_with(".experts"))?;
    STACKS.iter().find(|(stack, _)| *stack == end).map(|(_, parts)| (prefix, *parts))
}

/// Whether a tensor of this name is a stack, which has a dimension of experts.
pub fn is_stack(name: &str) -> bool {
    parse(name).is_some()
}

/// Whether a prefix is that of a layer with experts.
fn has_experts(prefix: &str, config: &ModelConfig) -> bool {
    let layer = prefix.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    layer.is_some_and(|(layer, rest)| {
        let layer = layer.parse().ok().filter(|&layer| layer < config.layers);
        rest == "mlp.experts" && layer.is_some_and(|layer| config.layer_experts(layer).is_some())
    })
}

/// The matrices of a stack by their canonical names; `None` if `name` is no stack of a layer with
/// experts.
///
/// # Errors
/// The expected shape, if the stack has another one.
pub fn split(
    name: &str,
    place: &TensorPlace,
    config: &ModelConfig,
) -> Option<Result<Vec<(String, TensorPlace)>, String>> {
    let (prefix, parts) = parse(name).filter(|(prefix, _)| has_experts(prefix, config))?;
    let experts = config.experts.as_ref()?;
    let (rows, cols) = match parts {
        ["down_proj"] => (config.hidden, experts.intermediate),
        _ => (experts.intermediate, config.hidden),
    };
    let whole = experts.count.saturating_mul(parts.len()).saturating_mul(rows);
    if (place.rows, place.cols) != (whole, cols) {
        let each = parts.len() * rows;
        return Some(Err(format!("{} matrices of shape [{each}, {cols}]", experts.count)));
    }
    let matrices = (0..experts.count).flat_map(|expert| {
        parts.iter().enumerate().map(move |(index, part)| {
            let first = (expert * parts.len() + index) * rows;
            (format!("{prefix}.{expert}.{part}.weight"), place.of_rows(first..first + rows))
        })
    });
    Some(Ok(matrices.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::hf::config::read;
    use crate::model::tensor::TensorType;
    use crate::model::testing::fixture;

    #[test]
    fn a_stack_becomes_the_matrices_of_its_experts() {
        let config = read(&fixture("qwen3-moe-f32")).unwrap();
        let experts = config.experts.as_ref().unwrap();
        let (count, inner, hidden) = (experts.count, experts.intermediate, config.hidden);
        let bytes = count * 2 * inner * hidden * 4;
        let place = TensorPlace {
            dtype: TensorType::F32,
            rows: count * 2 * inner,
            cols: hidden,
            data: 64..64 + bytes,
        };
        let name = "model.layers.1.mlp.experts.gate_up_proj";
        let matrices = split(name, &place, &config).unwrap().unwrap();
        assert_eq!(matrices.len(), 2 * count);
        let mut at = 64;
        for (index, (name, place)) in matrices.iter().enumerate() {
            let part = ["gate", "up"][index % 2];
            let expected = format!("model.layers.1.mlp.experts.{}.{part}_proj.weight", index / 2);
            assert_eq!((name, place.rows, place.cols), (&expected, inner, hidden));
            assert_eq!((place.data.start, place.data.len()), (at, inner * hidden * 4));
            at = place.data.end;
        }
        assert_eq!(at, 64 + bytes);

        let short = TensorPlace { rows: place.rows - 1, ..place.clone() };
        let expected = split(name, &short, &config).unwrap().unwrap_err();
        assert_eq!(expected, format!("5 matrices of shape [{}, {hidden}]", 2 * inner));
        for other in ["layers.0.mlp.experts", "layers.2.mlp.experts", "layers.1.experts"] {
            let name = format!("model.{other}.gate_up_proj");
            assert!(split(&name, &place, &config).is_none(), "{name}");
        }
        let dense = read(&fixture("qwen3-f32")).unwrap();
        assert!(split(name, &place, &dense).is_none());
        assert!(!is_stack("model.layers.1.mlp.down_proj") && !is_stack("down_proj"));
    }
}
