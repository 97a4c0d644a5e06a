//! Tests of Hugging Face directories that are accepted and directories that are refused.

use super::config::{SamplingDefaults, sampling_defaults};
use super::*;
use crate::limits::CONTEXT_MAX;
use crate::model::config::{
    Architecture, ExpertConfig, GemmaConfig, MultiplierConfig, RopeScaling, WindowConfig,
};
use crate::model::quant::dequantise_row;
use crate::model::recurrent_config::{DeltaConfig, MambaConfig, MambaNorm};
use crate::model::testing::{Scratch, fixture};
use serde_json::{Value, json};

/// A copy of a fixture with a changed configuration.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Scratch {
    let scratch = Scratch::copy_of(name);
    let path = scratch.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    scratch
}

fn read(name: &str, change: impl FnOnce(&mut Value)) -> ModelConfig {
    config::read(changed(name, change).path()).unwrap()
}

fn refusal_of(name: &str, change: impl FnOnce(&mut Value)) -> String {
    HfDirectory::open(changed(name, change).path()).unwrap_err().to_string()
}

fn refusal(change: impl FnOnce(&mut Value)) -> String {
    refusal_of("llama-f32", change)
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
        (refusal(|c| c["layer_types"] = json!(["full_attention"])), ["layer_types", "2 kinds"]),
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
fn experts_of_each_architecture_are_read() {
    for (name, architecture, shared_intermediate, normalised, dense_layers) in [
        ("mixtral-f32", Architecture::Mixtral, None, true, vec![]),
        ("qwen2-moe-f32", Architecture::Qwen2Moe, Some(64), false, vec![]),
        ("qwen3-moe-f32", Architecture::Qwen3Moe, None, true, vec![0]),
    ] {
        let directory = HfDirectory::open(&fixture(name)).unwrap();
        let config = directory.config();
        let experts = ExpertConfig {
            count: 5,
            used: 2,
            intermediate: 32,
            shared_intermediate,
            normalised,
            dense_layers,
        };
        assert_eq!((config.architecture, config.experts.as_ref()), (architecture, Some(&experts)));
        assert_eq!(config.attention_bias, architecture == Architecture::Qwen2Moe);
        let name = "model.layers.1.mlp.experts.4.down_proj.weight";
        assert_eq!(directory.tensor(name).unwrap().unwrap().cols, 32);
    }
}

#[test]
fn fields_of_experts_have_two_spellings_and_defaults() {
    for name in ["mixtral-f32", "qwen2-moe-f32", "qwen3-moe-f32"] {
        for field in ["num_experts", "num_local_experts"] {
            let config = read(name, |c| {
                let fields = c.as_object_mut().unwrap();
                let both = ["num_experts", "num_local_experts"].map(|field| fields.remove(field));
                let count = both.into_iter().flatten().next().unwrap();
                fields.insert(field.into(), count);
            });
            assert_eq!(config.experts.unwrap().count, 5, "{name} {field}");
        }
    }
    let unset = |c: &mut Value| {
        for field in ["norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "qkv_bias"] {
            c.as_object_mut().unwrap().remove(field);
        }
    };
    let qwen2 = read("qwen2-moe-f32", unset);
    assert!(qwen2.attention_bias && !qwen2.experts.unwrap().normalised);
    let experts = read("qwen3-moe-f32", unset).experts.unwrap();
    assert!(!experts.normalised && experts.dense_layers.is_empty());
    let config = read("qwen3-moe-f32", |c| {
        c["num_hidden_layers"] = json!(7);
        c["decoder_sparse_step"] = json!(3);
        c["mlp_only_layers"] = json!([5, 9]);
    });
    assert_eq!(config.experts.unwrap().dense_layers, [0, 1, 3, 4, 5, 6]);
    let mixtral = read("mixtral-f32", |c| c["rope_parameters"] = Value::Null);
    assert_eq!(mixtral.rope_theta, 1e6);
}

#[test]
fn experts_that_do_not_fit_are_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change, [&str; 2]); 9] = [
        ("mixtral-f32", |c| c["num_experts_per_tok"] = json!(6), ["num_experts_per_tok", "the 5"]),
        ("mixtral-f32", |c| c["num_local_experts"] = json!(0), ["num_local_experts", "positive"]),
        ("mixtral-f32", |c| c["num_local_experts"] = json!(9999), ["num_local_experts", "1024"]),
        ("mixtral-f32", |c| c["num_local_experts"] = json!(6), ["experts.5", "no such tensor"]),
        ("mixtral-f32", |c| c["model_type"] = json!("dbrx"), ["model_type", "qwen3_next, found"]),
        ("qwen2-moe-f32", |c| c["num_experts"] = json!(6), ["mlp.experts.", "6 matrices"]),
        (
            "qwen2-moe-f32",
            |c| c["shared_expert_intermediate_size"] = Value::Null,
            ["shared_expert_intermediate_size", "nothing"],
        ),
        ("qwen3-moe-f32", |c| c["mlp_only_layers"] = json!([-1]), ["mlp_only_layers", "[-1]"]),
        ("qwen3-moe-f32", |c| c["mlp_only_layers"] = json!([]), ["layers.0.mlp.", "no such"]),
    ];
    for (name, change, parts) in cases {
        let message = refusal_of(name, change);
        assert!(parts.iter().all(|part| message.contains(part)), "{name}: {message}");
    }
    let deep = refusal(|c| c["num_hidden_layers"] = json!(u32::MAX));
    assert!(deep.contains("num_hidden_layers: expected at most 1024"), "{deep}");
}

/// Experts in blocks of MXFP4, latent attention, towers for images: the deciding line is named.
#[test]
fn other_architectures_are_refused_by_name() {
    let others = [
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
        "llama4",
        "mistral3",
        "qwen3_vl",
        "qwen3_vl_moe",
        "llava",
        "glm4_moe",
        "phi3",
        "mamba",
        "jamba",
        "bamba",
        "nemotron_h",
    ];
    for other in others {
        let message = refusal(|c| c["model_type"] = json!(other));
        let found = format!("qwen3_next, found {other}");
        assert!(message.contains("model_type: expected") && message.contains(&found), "{message}");
    }
    let blocks = json!({"quant_method": "mxfp4"});
    let message = refusal(|c| c["quantization_config"] = blocks.clone());
    assert!(message.contains("quantization_config"), "{message}");
}

#[test]
fn windows_are_those_of_transformers() {
    let window = |name: &str, change: &dyn Fn(&mut Value)| {
        let config = read(name, |c| {
            c["sliding_window"] = json!(64);
            change(c);
        });
        config.window.map(|window| (window.tokens, window.full_layers))
    };
    let kinds = |kinds: [&str; 2]| json!(kinds.map(|kind| format!("{kind}_attention")));
    let mistral = |c: &mut Value| c["model_type"] = json!("mistral");
    assert_eq!(window("llama-f32", &mistral), Some((64, vec![])));
    let null = |c: &mut Value| {
        mistral(c);
        c["sliding_window"] = Value::Null;
    };
    assert_eq!(window("llama-f32", &null), None);
    let missing = |c: &mut Value| {
        mistral(c);
        c.as_object_mut().unwrap().remove("sliding_window");
    };
    assert_eq!(window("llama-f32", &missing), Some((4096, vec![])));
    assert_eq!(window("mixtral-f32", &|_| {}), Some((64, vec![])));

    // Qwen's windows need a switch.
    for name in ["qwen2-f32", "qwen3-f32", "qwen2-moe-f32", "qwen3-moe-f32"] {
        assert_eq!(window(name, &|c| c["use_sliding_window"] = json!(false)), None, "{name}");
    }
    let used = |from: u64, types: Option<[&'static str; 2]>| {
        move |c: &mut Value| {
            c["use_sliding_window"] = json!(true);
            c["max_window_layers"] = json!(from);
            c["layer_types"] = types.map_or(Value::Null, kinds);
        }
    };
    assert_eq!(window("qwen3-f32", &used(1, None)), Some((64, vec![0])));
    assert_eq!(window("qwen2-f32", &used(2, None)), None);
    assert_eq!(window("qwen2-f32", &used(2, Some(["sliding", "full"]))), Some((64, vec![1])));
    assert_eq!(window("qwen2-moe-f32", &used(1, None)), Some((64, vec![1])));
    assert_eq!(window("qwen3-moe-f32", &used(1, None)), Some((64, vec![])));

    let without = refusal_of("qwen3-f32", |c| {
        c["use_sliding_window"] = json!(false);
        c["layer_types"] = kinds(["sliding", "full"]);
    });
    assert!(without.contains("sliding_window: expected a window that is used"), "{without}");
    // transformers reads no list of these models, and gives all layers the window.
    for name in ["mistral-f32", "qwen3-moe-f32"] {
        let message = refusal_of(name, |c| {
            c["use_sliding_window"] = json!(true);
            c["sliding_window"] = json!(64);
            c["layer_types"] = kinds(["sliding", "full"]);
        });
        assert!(message.contains("layer_types: expected sliding_attention in all"), "{message}");
    }
}

#[test]
fn gemma_is_read_in_both_spellings() {
    let [new, old] =
        ["gemma3-f32", "gemma3-bf16"].map(|name| HfDirectory::open(&fixture(name)).unwrap());
    assert_eq!(new.config(), old.config());
    let config = new.config();
    assert_eq!((config.architecture, config.tied_head), (Architecture::Gemma3, true));
    assert_eq!(config.window, Some(WindowConfig { tokens: 24, full_layers: vec![1] }));
    let gemma = GemmaConfig {
        query_scalar: 20.0,
        window_rope_theta: 1e4,
        norm_offset: 1.0,
        logit_cap: Some(200.0),
    };
    assert_eq!((config.rope_theta, config.gemma.as_ref()), (1e6, Some(&gemma)));

    let defaults = read("gemma3-bf16", |c| {
        c["num_hidden_layers"] = json!(13);
        for field in [
            "query_pre_attn_scalar",
            "final_logit_softcapping",
            "sliding_window",
            "sliding_window_pattern",
            "rope_theta",
            "rope_local_base_freq",
            "head_dim",
            "tie_word_embeddings",
            "hidden_activation",
        ] {
            c.as_object_mut().unwrap().remove(field);
        }
    });
    let missing = refusal_of("gemma3-bf16", |c| c["sliding_window"] = Value::Null);
    assert!(missing.contains("sliding_window: expected a window"), "{missing}");
    let gemma = GemmaConfig { query_scalar: 256.0, logit_cap: None, ..gemma };
    assert_eq!(defaults.gemma, Some(gemma));
    assert_eq!(defaults.window, Some(WindowConfig { tokens: 4096, full_layers: vec![5, 11] }));
    assert_eq!((defaults.rope_theta, defaults.head_dim, defaults.tied_head), (1e6, 256, true));
    // The larger checkpoints scale the frequencies of full layers.
    let scaled = json!({"rope_type": "linear", "factor": 8.0});
    let old = read("gemma3-bf16", |c| c["rope_scaling"] = scaled.clone());
    assert_eq!(old.rope_scaling, RopeScaling::Linear { factor: 8.0 });
    let new = read("gemma3-f32", |c| c["rope_parameters"]["full_attention"] = scaled.clone());
    assert_eq!((new.rope_scaling, new.rope_theta), (old.rope_scaling, 1e6));
    assert_eq!(new.gemma, old.gemma);
}

#[test]
fn recurrent_layers_are_read_in_both_spellings() {
    let [new, old] =
        ["mamba2-f32", "mamba2-bf16"].map(|name| HfDirectory::open(&fixture(name)).unwrap());
    assert_eq!(new.config(), old.config());
    let mamba = MambaConfig {
        heads: 8,
        head_dim: 16,
        state: 16,
        groups: 2,
        conv_width: 4,
        conv_bias: true,
        input_bias: false,
        output_bias: false,
        norm: MambaNorm::AfterGate,
        log_decay: true,
    };
    let expected = ModelConfig {
        hidden: 64,
        layers: 2,
        vocab: 384,
        context: CONTEXT_MAX as usize,
        norm_eps: 1e-5,
        bos: Some(0),
        eos: vec![2],
        ..ModelConfig::of_mamba(mamba)
    };
    assert_eq!(new.config(), &expected);
    let other = HfDirectory::open(&fixture("mamba2-odd-f32")).unwrap();
    let odd = other.config().mamba.as_ref().unwrap();
    assert_eq!((odd.conv_bias, odd.input_bias && odd.output_bias, odd.state), (false, true, 9));
}

#[test]
fn falcon_is_read_in_both_spellings() {
    let [new, old] =
        ["falcon-h1-f32", "falcon-h1-bf16"].map(|name| HfDirectory::open(&fixture(name)).unwrap());
    assert_eq!(new.config(), old.config());
    let config = new.config();
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (4, 2, 16));
    let mamba = MambaConfig {
        heads: 6,
        head_dim: 16,
        state: 16,
        groups: 2,
        conv_width: 4,
        conv_bias: true,
        input_bias: false,
        output_bias: false,
        norm: MambaNorm::None,
        log_decay: true,
    };
    assert_eq!(config.mamba, Some(mamba));
    let multipliers = MultiplierConfig {
        embedding: 1.5,
        head: 0.75,
        attention_in: 1.375,
        attention_out: 0.625,
        key: 1.25,
        ssm_in: 1.125,
        ssm_out: 0.875,
        ssm: [0.5, 1.5, 1.75, 1.25, 0.375],
        gate: 1.625,
        down: 0.5,
    };
    assert_eq!(config.multipliers, Some(multipliers));
    let other = HfDirectory::open(&fixture("falcon-h1-norm-f32")).unwrap();
    assert_eq!(other.config().mamba.as_ref().unwrap().norm, MambaNorm::BeforeGate);
    assert_eq!(other.config().multipliers, Some(MultiplierConfig::default()));
    let message = refusal_of("falcon-h1-f32", |c| c["mamba_d_ssm"] = Value::Null);
    assert!(message.contains("mamba_d_ssm: expected 6 heads"), "mamba_expand is 2: {message}");
}

#[test]
fn delta_nets_are_read_in_both_spellings() {
    let [new, old] = ["qwen3-next-f32", "qwen3-next-bf16"]
        .map(|name| HfDirectory::open(&fixture(name)).unwrap());
    assert_eq!(new.config(), old.config());
    let delta = DeltaConfig {
        key_heads: 2,
        value_heads: 4,
        key_dim: 16,
        value_dim: 16,
        conv_width: 4,
        full_layers: vec![3],
        rotary_dim: 8,
        by_key_head: true,
        log_decay: true,
        norm_offset: 1.0,
    };
    assert_eq!(new.config().delta, Some(delta.clone()));
    let without = |c: &mut Value, field: &str| c.as_object_mut().unwrap().remove(field);
    let period = read("qwen3-next-f32", |c| {
        without(c, "layer_types");
        c["full_attention_interval"] = json!(2);
    });
    let expected = DeltaConfig { full_layers: vec![1, 3], ..delta };
    assert_eq!(period.delta, Some(expected));
    let experts = new.config().experts.as_ref().unwrap();
    assert_eq!((experts.count, experts.used, experts.normalised), (5, 2, true));
}

#[test]
fn what_is_not_served_of_delta_nets_is_refused_by_name() {
    for (field, value) in [
        ("attention_bias", json!(true)),
        ("linear_num_value_heads", json!(3)),
        ("linear_num_key_heads", json!(1 << 20)),
        ("linear_key_head_dim", json!(1 << 20)),
        ("linear_conv_kernel_dim", json!(1)),
        ("layer_types", json!(["full_attention"])),
        ("layer_types", json!(vec!["full_attention"; 4])),
        ("layer_types", json!(vec!["sliding_attention"; 4])),
    ] {
        let message = refusal_of("qwen3-next-f32", |c| c[field] = value.clone());
        assert!(message.contains(&format!("{field}: expected ")), "{field}: {message}");
    }
    for factor in [0.01, 1.5, 0.1] {
        let message = refusal_of("qwen3-next-f32", |c| {
            c["rope_parameters"]["partial_rotary_factor"] = json!(factor);
        });
        assert!(message.contains("partial_rotary_factor: expected a factor"), "{message}");
    }
}

#[test]
fn what_is_not_served_of_falcon_is_refused_by_name() {
    for (field, value) in [
        ("mamba_proj_bias", json!(true)),
        ("projectors_bias", json!(true)),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("ssm_multipliers", json!([1.0])),
        ("mlp_multipliers", json!([1.0, "x"])),
        ("key_multiplier", json!(-1.0)),
        ("mamba_d_ssm", json!(97)),
        ("mamba_n_groups", json!(4)),
        ("mamba_n_heads", json!(1 << 20)),
        ("time_step_limit", json!([0.0, 1.0])),
    ] {
        let message = refusal_of("falcon-h1-f32", |c| c[field] = value.clone());
        assert!(message.contains(&format!("{field}: expected ")), "{field}: {message}");
    }
}

#[test]
fn what_is_not_served_of_mamba_is_refused_by_name() {
    let endless = json!({"__float__": "Infinity"});
    let cases: [(&str, Value); 14] = [
        ("time_step_limit", json!([0.0, 0.5])),
        ("time_step_limit", json!([0.1, endless])),
        ("time_step_limit", json!([0.0, "-inf"])),
        ("time_step_limit", json!([0.0])),
        ("time_step_limit", json!([null, endless])),
        ("time_step_limit", json!(0.5)),
        ("layer_norm_epsilon", json!("inf")),
        ("hidden_act", json!("gelu")),
        ("n_groups", json!(3)),
        ("expand", json!(3)),
        ("conv_kernel", json!(1)),
        ("conv_kernel", json!(17)),
        ("num_heads", json!(1 << 20)),
        ("state_size", json!(1 << 20)),
    ];
    for (field, value) in cases {
        let message = refusal_of("mamba2-f32", |c| c[field] = value.clone());
        assert!(message.contains(&format!("{field}: expected ")), "{field}: {message}");
    }
    let message = refusal_of("mamba2-f32", |c| c["state_size"] = json!(17));
    assert!(message.contains("mamba.in_proj.weight: expected shape"), "{message}");
}

#[test]
fn what_gemma_has_and_baton_does_not_is_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 10] = [
        (|c| c["model_type"] = json!("gemma3"), "model_type"),
        (|c| c["sliding_window"] = Value::Null, "sliding_window"),
        (|c| c["final_logit_softcapping"] = json!(1e300), "final_logit_softcapping"),
        (
            |c| c["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = json!(0.5),
            "rope_parameters.sliding_attention.partial_rotary_factor",
        ),
        (|c| c["attn_logit_softcapping"] = json!(50.0), "attn_logit_softcapping"),
        (|c| c["use_bidirectional_attention"] = json!(true), "use_bidirectional_attention"),
        (|c| c["hidden_activation"] = json!("gelu"), "hidden_activation"),
        (|c| c["query_pre_attn_scalar"] = json!(0), "query_pre_attn_scalar"),
        (|c| c["final_logit_softcapping"] = json!(-1), "final_logit_softcapping"),
        (
            |c| c["rope_parameters"]["sliding_attention"]["rope_type"] = json!("linear"),
            "rope_parameters.sliding_attention.rope_type",
        ),
    ];
    for (change, field) in cases {
        let message = refusal_of("gemma3-f32", change);
        assert!(message.contains(field), "{field}: {message}");
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
