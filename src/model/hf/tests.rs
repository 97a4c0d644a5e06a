//! Tests of Hugging Face directories that are accepted and directories that are refused.

use super::config::{SamplingDefaults, sampling_defaults};
use super::*;
use crate::model::config::{Architecture, RopeScaling};
use crate::model::quant::dequantise_row;
use crate::model::testing::{Scratch, fixture};
use serde_json::{Value, json};

fn refusal(change: impl FnOnce(&mut Value)) -> String {
    let scratch = Scratch::copy_of("llama-f32");
    let path = scratch.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    HfDirectory::open(scratch.path()).unwrap_err().to_string()
}

#[test]
fn both_spellings_say_the_same() {
    let [new, old] =
        ["qwen3-f32", "qwen3-bf16"].map(|name| HfDirectory::open(&fixture(name)).unwrap());
    assert_eq!(new.config(), old.config());
    assert_eq!(new.config().architecture, Architecture::Qwen3);
    assert_eq!((new.config().rope_theta, new.config().eos.as_slice()), (10000.0, &[2][..]));
    let llama3 = HfDirectory::open(&fixture("llama-mha-llama3-bf16")).unwrap();
    assert!(matches!(llama3.config().rope_scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
    let yarn = HfDirectory::open(&fixture("llama-mqa-yarn-f32")).unwrap();
    let RopeScaling::Yarn { factor, original_context, beta_fast, .. } = yarn.config().rope_scaling
    else {
        panic!("{:?}", yarn.config())
    };
    assert_eq!((factor, original_context, beta_fast), (4.0, 64, 32.0));
}

#[test]
fn shards_make_one_model() {
    let sharded = HfDirectory::open(&fixture("llama-f32")).unwrap();
    assert!(sharded.shards().len() > 1);
    let single = HfDirectory::open(&fixture("llama-bf16")).unwrap();
    for name in single.names() {
        let [a, b] = [&sharded, &single].map(|source| {
            let tensor = source.tensor(name).unwrap().unwrap();
            let mut row = vec![0.0; tensor.cols];
            dequantise_row(&tensor, tensor.rows - 1, &mut row);
            row
        });
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= a.abs() / 128.0), "{name}");
    }
}

#[test]
fn a_setting_that_would_change_results_is_refused_by_name() {
    let rope =
        |field: &str, value: Value| refusal(|config| config["rope_parameters"][field] = value);
    for (message, parts) in [
        (refusal(|c| c["model_type"] = json!("mamba")), ["model_type", "mamba"]),
        (refusal(|c| c["hidden_act"] = json!("gelu")), ["hidden_act", "gelu"]),
        (
            refusal(|c| c["quantization_config"] = json!({"bits": 4})),
            ["quantization_config", "bits"],
        ),
        (refusal(|c| c["sliding_window"] = json!(64)), ["sliding_window", "64"]),
        (
            refusal(|c| c["layer_types"] = json!(["linear_attention"])),
            ["layer_types", "linear_attention"],
        ),
        (refusal(|c| c["num_hidden_layers"] = json!(0)), ["num_hidden_layers", "positive"]),
        (refusal(|c| c["num_hidden_layers"] = json!("2")), ["num_hidden_layers", "\"2\""]),
        (refusal(|c| c["num_key_value_heads"] = json!(3)), ["num_key_value_heads", "divisor of 4"]),
        (rope("rope_type", json!("longrope")), ["rope_parameters.rope_type", "longrope"]),
        (rope("partial_rotary_factor", json!(0.5)), ["partial_rotary_factor", "0.5"]),
        (rope("rope_type", json!("yarn")), ["rope_parameters.factor", "nothing"]),
    ] {
        assert!(message.contains("config.json"), "{message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let wider = refusal(|c| c["intermediate_size"] = json!(128));
    assert!(wider.contains("mlp.gate_proj.weight") && wider.contains("[128, 64]"), "{wider}");
    let deeper = refusal(|c| c["num_hidden_layers"] = json!(3));
    assert!(deeper.contains("model.layers.2.") && deeper.contains("no such tensor"), "{deeper}");
    let shallower = refusal(|c| c["num_hidden_layers"] = json!(1));
    assert!(shallower.contains("model.layers.1."), "{shallower}");
    let untied = refusal(|c| c["tie_word_embeddings"] = json!(false));
    assert!(untied.contains("lm_head.weight"), "{untied}");
    let biased = refusal(|c| c["mlp_bias"] = json!(true));
    assert!(biased.contains("gate_proj.bias"), "{biased}");
}

#[test]
fn missing_and_cut_files_are_named() {
    let scratch = Scratch::copy_of("llama-bf16");
    let weights = scratch.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    let cut = HfDirectory::open(scratch.path()).unwrap_err().to_string();
    assert!(cut.contains("model.safetensors: not whole"), "{cut}");
    std::fs::remove_file(&weights).unwrap();
    let gone = HfDirectory::open(scratch.path()).unwrap_err().to_string();
    assert!(gone.contains("model.safetensors"), "{gone}");
    let nothing = HfDirectory::open(Path::new("/nonexistent")).unwrap_err().to_string();
    assert!(nothing.contains("/nonexistent/config.json"), "{nothing}");
}

#[test]
fn generation_config_says_how_to_end_and_sample() {
    let scratch = Scratch::copy_of("llama-bf16");
    let generation = json!({"eos_token_id": [5, 2], "temperature": 0.6, "top_k": 20});
    std::fs::write(scratch.path().join("generation_config.json"), generation.to_string()).unwrap();
    assert_eq!(HfDirectory::open(scratch.path()).unwrap().config().eos, [5, 2]);
    let expected =
        SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..Default::default() };
    assert_eq!(sampling_defaults(scratch.path()).unwrap(), expected);
}
