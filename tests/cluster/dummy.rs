//! Models with random weights, made for a test. One test runs without weights and without data
//! transfers.

use crate::fleet::Fleet;
use crate::process::{Process, post};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

/// A directory with a configuration and a tokenizer, without weights. It is removed on drop.
pub struct Dummy(PathBuf);

impl Dummy {
    /// The usual model with these fields of its configuration changed.
    pub fn new(changes: &Value) -> Dummy {
        Dummy::of(Path::new(crate::MODEL), changes)
    }

    /// This model with changed fields.
    fn of(model: &Path, changes: &Value) -> Dummy {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dummy = Dummy(
            std::env::temp_dir().join(format!("baton-dummy-{}-{number}", std::process::id())),
        );
        std::fs::create_dir(&dummy.0).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            // Older directories have the template in the settings.
            if model.join(file).exists() {
                std::fs::copy(model.join(file), dummy.0.join(file)).unwrap();
            }
        }
        let config = std::fs::read_to_string(model.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        for (field, value) in changes.as_object().unwrap() {
            config[field.as_str()] = value.clone();
        }
        std::fs::write(dummy.0.join("config.json"), config.to_string()).unwrap();
        dummy
    }

    /// So large that a prompt of some hundred tokens takes a good part of a second.
    pub fn slow() -> Dummy {
        Dummy::new(&json!({"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64,
            "num_hidden_layers": 8, "max_position_embeddings": 2048}))
    }

    /// Models as slow as [`Dummy::slow`]: with windows, with windows in all layers, with experts,
    /// with recurrent layers alone, beside attention in each layer, and among other layers.
    pub fn slow_others() -> [Dummy; 6] {
        let wide = json!({"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64,
            "num_hidden_layers": 8, "max_position_embeddings": 2048});
        // A token uses two of them.
        let mut experts = wide.clone();
        experts["moe_intermediate_size"] = json!(512);
        let recurrent = json!({"hidden_size": 256, "num_heads": 32, "num_hidden_layers": 20});
        let mut hybrid = wide.clone();
        (hybrid["mamba_d_ssm"], hybrid["mamba_n_heads"]) = (json!(512), json!(32));
        let mut delta = wide.clone();
        (delta["linear_num_key_heads"], delta["linear_num_value_heads"]) = (json!(8), json!(16));
        let kind = |layer| if layer % 4 == 0 { "full_attention" } else { "linear_attention" };
        delta["layer_types"] = (1..=8).map(kind).collect();
        delta["shared_expert_intermediate_size"] = json!(1024);
        let models = [
            ("gemma3-bf16", wide.clone()),
            ("mistral-f32", wide),
            ("qwen3-moe-f32", experts),
            ("mamba2-f32", recurrent),
            ("falcon-h1-f32", hybrid),
            ("qwen3-next-f32", delta),
        ];
        let fixtures = Path::new(crate::MODEL).parent().expect("a folder of fixtures");
        models.map(|(name, changes)| Dummy::of(&fixtures.join(name), &changes))
    }

    /// `baton COMMAND` with this model, on a free port.
    pub fn start(&self, command: &str, more: &[&str]) -> Process {
        self.start_at(0, command, more)
    }

    /// The same on this port.
    pub fn start_at(&self, port: u16, command: &str, more: &[&str]) -> Process {
        let port = port.to_string();
        let mut args = vec![command, self.0.to_str().unwrap(), "--load-format", "dummy"];
        args.extend(["--port", &port, "--threads", "1"]);
        if !more.contains(&"--kv-memory") {
            args.extend(["--kv-memory", "32MiB"]);
        }
        args.extend(more);
        Process::start(&args)
    }
}

impl Drop for Dummy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[track_caller]
fn check_length((status, text): (u16, String), tokens: usize) {
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], tokens, "{text}");
    assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), tokens);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

fn body(salt: u32, tokens: usize) -> Value {
    let prompt: Vec<u32> = (0..20 + 5 * salt).map(|i| 3 + (i * 7 + salt * 13) % 380).collect();
    json!({"prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "return_token_ids": true})
}

/// More requests than the workers have slots. A finished request must not delay another.
#[test]
fn a_router_and_two_workers_without_weights_that_move_nothing() {
    let dummy = Dummy::new(&json!({}));
    let fake = ["--transfer", "fake", "--max-running-requests", "4"];
    let prefill = dummy.start("prefill", &[&fake[..], &["--bootstrap-port", "0"]].concat());
    let decode = dummy.start("decode", &fake);
    let mut fleet = Fleet::new(vec![prefill], vec![decode]);
    let address = fleet.router.address;
    for round in 0..16 {
        thread::scope(|scope| {
            for salt in 0..4 {
                scope.spawn(move || {
                    let tokens = 1 + round + salt as usize;
                    let answer = post(address, "/v1/completions", &body(salt, tokens).to_string());
                    check_length(answer, tokens);
                });
            }
        });
    }
    fleet.check_idle();
    assert!(
        fleet.prefill[0].metric("sglang:prompt_tokens_total{", "") > 0.0,
        "prefill has read prompts"
    );
}

/// The bootstrap fields name no real worker; 64 clients at once, several times.
#[test]
fn decode_alone_under_load_without_weights() {
    let dummy = Dummy::new(&json!({}));
    let mut decode = dummy.start("decode", &["--transfer", "fake", "--max-running-requests", "16"]);
    let address = decode.address;
    thread::scope(|scope| {
        for client in 0..64u32 {
            scope.spawn(move || {
                for round in 0..4 {
                    let tokens = 8 + (client as usize + round) % 9;
                    let mut body = body(client % 7, tokens);
                    body["bootstrap_host"] = json!("2.2.2.2");
                    body["bootstrap_room"] = json!(client * 10 + round as u32);
                    check_length(post(address, "/v1/completions", &body.to_string()), tokens);
                }
            });
        }
    });
    decode.await_idle();
    decode.check_alive();
    assert!(decode.metric("sglang:generation_tokens_total{", "") >= 64.0 * 4.0 * 8.0);
}
