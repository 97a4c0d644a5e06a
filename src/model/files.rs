//! Opens all model files that a server needs, in any supported format.

use super::chat::{ChatError, ChatTemplate};
use super::config::ModelConfig;
use super::dummy::DummyWeights;
use super::fingerprint::ModelFingerprint;
use super::gguf::GgufFile;
use super::gguf::metadata::Metadata;
use super::hf::HfDirectory;
use super::hf::config::{self as hf_config, SamplingDefaults};
use super::hf::json_object::read_json;
use super::tensor::TensorType;
use super::tokenizer::Tokenizer;
use super::weights::{LoadError, WeightSource};
use std::io::ErrorKind;
use std::path::Path;

/// Files of a Hugging Face directory that [`ModelFiles::open`] reads, beside the weights. Those
/// with `true` are necessary.
pub const SIDE_FILES: [(&str, bool); 5] = [
    ("config.json", true),
    ("generation_config.json", false),
    ("tokenizer.json", true),
    ("tokenizer_config.json", false),
    ("chat_template.jinja", false),
];

const NOT_HERE: &str = "there is no such file or directory: MODEL is a Hugging Face directory, \
    a .gguf file, or OWNER/REPOSITORY on a model hub";
const NO_CONFIG: &str = "the directory holds no config.json: \
    MODEL is a Hugging Face directory or the path of a .gguf file itself";

/// The source of weights (`--load-format`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WeightFormat {
    /// The model's files, in the format that they have.
    #[default]
    Auto,
    /// Random weights, from `config.json` alone.
    Dummy,
}

/// An opened model.
pub struct ModelFiles {
    /// Sizes and constants.
    pub config: ModelConfig,
    /// The tensors.
    pub weights: Box<dyn WeightSource + Send + Sync>,
    /// The vocabulary.
    pub tokenizer: Tokenizer,
    /// The chat template, or the reason why chat is not available.
    pub chat_template: Result<ChatTemplate, ChatError>,
    /// Sampling parameters recommended by the model's makers.
    pub sampling: SamplingDefaults,
    /// Type of the matrices, taken from the first one.
    pub checkpoint: TensorType,
    /// Total length of the weight files.
    pub file_bytes: u64,
    /// Hashes to compare with those of a peer.
    pub fingerprint: ModelFingerprint,
}

impl ModelFiles {
    /// Opens a GGUF file or a Hugging Face directory.
    pub fn open(path: &Path, format: WeightFormat) -> Result<ModelFiles, LoadError> {
        let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => LoadError::malformed(path, NOT_HERE),
            _ => LoadError::io(path, error),
        })?;
        let config = path.join("config.json");
        if metadata.is_dir()
            && !config.try_exists().map_err(|error| LoadError::io(&config, error))?
        {
            return Err(LoadError::malformed(path, NO_CONFIG));
        }
        match format {
            WeightFormat::Auto if metadata.is_dir() => open_directory(path),
            WeightFormat::Auto => open_gguf(path),
            WeightFormat::Dummy if metadata.is_dir() => open_dummy(path),
            WeightFormat::Dummy => Err(LoadError::malformed(
                path,
                "expected a directory with a config.json, found a file",
            )),
        }
    }

    fn new(
        config: ModelConfig,
        weights: Box<dyn WeightSource + Send + Sync>,
        tokenizer: Tokenizer,
        chat_template: Result<ChatTemplate, ChatError>,
        sampling: SamplingDefaults,
        file_bytes: u64,
    ) -> Result<ModelFiles, LoadError> {
        const FIRST: [&str; 4] = [
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.mamba.in_proj.weight",
            "model.layers.0.linear_attn.in_proj_qkvz.weight",
            "model.layers.0.linear_attn.in_proj_qkv.weight",
        ];
        if tokenizer.vocab_size() > config.vocab {
            let found = format!("{} in the tokenizer", tokenizer.vocab_size());
            let expected = format!("at most the model's {} ids", config.vocab);
            return Err(LoadError::field(weights.describe(), "vocabulary", expected, found));
        }
        let mut first = None;
        for name in FIRST {
            first = first.or(weights.tensor(name)?);
        }
        let checkpoint = first.map_or(TensorType::F32, |tensor| tensor.dtype);
        let template = chat_template.as_ref().ok();
        let fingerprint = ModelFingerprint::new(&config, weights.as_ref(), &tokenizer, template)?;
        Ok(ModelFiles {
            config,
            weights,
            tokenizer,
            chat_template,
            sampling,
            checkpoint,
            file_bytes,
            fingerprint,
        })
    }
}

fn open_gguf(path: &Path) -> Result<ModelFiles, LoadError> {
    let file = GgufFile::open(path)?;
    let metadata = file.metadata();
    let tokenizer = Tokenizer::from_gguf(&metadata)?;
    let template = match metadata.string("tokenizer.chat_template")? {
        Some(source) => ChatTemplate::new(source, gguf_special_tokens(&metadata, &tokenizer)?),
        None => Err(ChatError::Missing),
    };
    let (config, bytes) = (file.config().clone(), metadata.bytes.len() as u64);
    ModelFiles::new(config, Box::new(file), tokenizer, template, SamplingDefaults::default(), bytes)
}

fn open_directory(path: &Path) -> Result<ModelFiles, LoadError> {
    let directory = HfDirectory::open(path)?;
    let tokenizer = Tokenizer::from_hf(path, directory.config().vocab)?;
    let template = directory_template(path)?;
    let sampling = hf_config::sampling_defaults(path)?;
    let bytes = directory.shards().iter().map(|shard| shard.bytes().len() as u64).sum();
    let config = directory.config().clone();
    ModelFiles::new(config, Box::new(directory), tokenizer, template, sampling, bytes)
}

fn open_dummy(path: &Path) -> Result<ModelFiles, LoadError> {
    let config = hf_config::read(path)?;
    let weights = DummyWeights::new(&config, hf_config::dtype(path)?, path)?;
    let tokenizer = if path.join("tokenizer.json").exists() {
        Tokenizer::from_hf(path, config.vocab)?
    } else {
        Tokenizer::of_bytes(config.vocab, path)?
    };
    let template = directory_template(path)?;
    let sampling = hf_config::sampling_defaults(path)?;
    ModelFiles::new(config, Box::new(weights), tokenizer, template, sampling, 0)
}

/// The names of special tokens in templates, and in GGUF.
const SPECIAL: [(&str, &str); 4] = [
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("pad_token", "padding"),
];

fn gguf_special_tokens(
    metadata: &Metadata<'_>,
    tokenizer: &Tokenizer,
) -> Result<Vec<(String, String)>, LoadError> {
    let mut special = Vec::new();
    for (name, theirs) in SPECIAL {
        if let Some(id) = metadata.u32(&format!("tokenizer.ggml.{theirs}_token_id"))? {
            special.push((name.to_owned(), tokenizer.token_text(id)));
        }
    }
    Ok(special)
}

/// Reads the template from its own file, or from `tokenizer_config.json`. The latter holds one
/// text, or several texts of which one has the name `default`.
fn directory_template(path: &Path) -> Result<Result<ChatTemplate, ChatError>, LoadError> {
    let settings = path.join("tokenizer_config.json");
    let settings = if settings.exists() { read_json(&settings)? } else { serde_json::Value::Null };
    let special = SPECIAL.iter().filter_map(|(name, _)| {
        let token = &settings[*name];
        let text = token.as_str().or_else(|| token["content"].as_str())?;
        Some(((*name).to_owned(), text.to_owned()))
    });
    let file = path.join("chat_template.jinja");
    let source = if file.exists() {
        Some(std::fs::read_to_string(&file).map_err(|error| LoadError::io(&file, error))?)
    } else {
        let stated = &settings["chat_template"];
        let named = stated.as_array().into_iter().flatten();
        let default =
            named.filter(|one| one["name"] == "default").find_map(|one| one["template"].as_str());
        stated.as_str().or(default).map(str::to_owned)
    };
    let source = source.ok_or(ChatError::Missing);
    Ok(source.and_then(|source| ChatTemplate::new(&source, special.collect())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::chat::Conversation;
    use crate::model::testing::{Scratch, fixture, smollm2};
    use serde_json::{Value, json};
    use std::time::Duration;

    fn ask(files: &ModelFiles) -> String {
        let conversation = Conversation {
            messages: &[json!({"role": "user", "content": "What is the capital of France?"})],
            tools: None,
            variables: None,
            add_generation_prompt: true,
            now: Duration::ZERO,
        };
        files.chat_template.as_ref().unwrap().render(&conversation).unwrap()
    }

    #[test]
    fn every_fixture_opens() {
        let mut count = 0;
        for entry in std::fs::read_dir(fixture("")).unwrap() {
            let path = entry.unwrap().path();
            let files = ModelFiles::open(&path, WeightFormat::Auto).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap();
            let kind = name.trim_end_matches(".gguf").rsplit(['.', '-']).next().unwrap();
            assert_eq!(
                format!("{:?}", files.checkpoint).to_lowercase(),
                kind.to_lowercase(),
                "{name}"
            );
            assert_eq!((files.config.vocab, files.config.bos), (384, Some(0)));
            assert!(ask(&files).ends_with("France?<|im_end|>\n<|im_start|>assistant\n"), "{name}");
            assert!(files.file_bytes > 50_000);
            count += 1;
        }
        assert_eq!(count, 49);
    }

    /// The text models of Gemma 3 have the tokenizer of those with images.
    #[test]
    fn added_tokens_beyond_the_embedding_are_left_out() {
        let scratch = Scratch::copy_of("llama-f32");
        let path = scratch.path().join("tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let mut image = file["added_tokens"][0].clone();
        (image["id"], image["content"]) = (json!(384), json!("<image>"));
        file["added_tokens"].as_array_mut().unwrap().push(image);
        std::fs::write(&path, file.to_string()).unwrap();
        let files = ModelFiles::open(scratch.path(), WeightFormat::Auto).unwrap();
        assert_eq!(files.tokenizer.vocab_size(), 384);
        let ids = files.tokenizer.encode("<image><|im_end|>", false).unwrap();
        assert!(ids.len() > 2 && ids.iter().all(|&id| id < 384), "{ids:?}");
        assert_eq!(files.tokenizer.decode(&ids, false), "<image><|im_end|>");
    }

    #[test]
    fn a_gguf_file_has_the_same_config_as_its_directory() {
        for (file, directory) in [
            ("llama.F32.gguf", "llama-f32"),
            ("qwen2.Q8_0.gguf", "qwen2-f32"),
            ("qwen3.Q5_1.gguf", "qwen3-f16"),
            ("llama-mqa-yarn.Q8_0.gguf", "llama-mqa-yarn-f32"),
            ("llama-mha-llama3.F16.gguf", "llama-mha-llama3-bf16"),
            ("mixtral.F32.gguf", "mixtral-f32"),
        ] {
            let [file, directory] = [file, directory]
                .map(|name| ModelFiles::open(&fixture(name), WeightFormat::Auto).unwrap());
            assert_eq!(file.config, directory.config);
            assert_eq!(file.fingerprint.config, directory.fingerprint.config);
            assert_ne!(file.fingerprint.weights, directory.fingerprint.weights);
        }
    }

    #[test]
    fn a_fingerprint_tells_what_differs() {
        let open = |path: &Path| ModelFiles::open(path, WeightFormat::Auto).unwrap().fingerprint;
        let scratch = Scratch::copy_of("qwen2-bf16");
        let original = open(scratch.path());
        assert_eq!(original, open(&fixture("qwen2-bf16")));
        std::fs::write(scratch.path().join("chat_template.jinja"), "x").unwrap();
        let templated = open(scratch.path());
        assert_ne!(templated.template, original.template);
        let weights = scratch.path().join("model.safetensors");
        let mut bytes = std::fs::read(&weights).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&weights, bytes).unwrap();
        let changed = open(scratch.path());
        assert_ne!(changed.weights, original.weights);
        assert_eq!((changed.config, changed.tokenizer), (original.config, original.tokenizer));
    }

    #[test]
    fn a_configuration_alone_is_a_dummy_model() {
        let scratch = Scratch::copy_of("qwen2-f16");
        for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            std::fs::remove_file(scratch.path().join(name)).unwrap();
        }
        let files = ModelFiles::open(scratch.path(), WeightFormat::Dummy).unwrap();
        assert_eq!(files.checkpoint, TensorType::F16);
        assert!(matches!(files.chat_template, Err(ChatError::Missing)));
        let ids = files.tokenizer.encode("hé", true).unwrap();
        assert_eq!(ids, [104, 0xc3, 0xa9]);
        assert_eq!(files.tokenizer.decode(&ids, true), "hé");
        assert!(files.tokenizer.vocab_size() <= files.config.vocab);
    }

    #[test]
    fn templates_are_found_in_every_place() {
        let scratch = Scratch::copy_of("qwen2-f16");
        let settings = scratch.path().join("tokenizer_config.json");
        let named = json!({"bos_token": {"content": "<b>"}, "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}"}]});
        std::fs::write(&settings, named.to_string()).unwrap();
        let open = || ModelFiles::open(scratch.path(), WeightFormat::Auto).unwrap();
        assert_eq!(ask(&open()), "<b>");
        std::fs::write(scratch.path().join("chat_template.jinja"), "{{ bos_token }}!").unwrap();
        assert_eq!(ask(&open()), "<b>!");
        std::fs::write(scratch.path().join("chat_template.jinja"), "{% if %}").unwrap();
        assert!(matches!(open().chat_template, Err(ChatError::Template(_))));
    }

    #[test]
    fn smollm2_opens() {
        let Some(path) = smollm2() else { return };
        let files = ModelFiles::open(&path, WeightFormat::Auto).unwrap();
        let config = &files.config;
        assert_eq!((config.layers, config.heads, config.kv_heads, config.head_dim), (30, 9, 3, 64));
        assert_eq!((config.vocab, config.context, config.eos.as_slice()), (49152, 8192, &[2][..]));
        assert!(config.tied_head && !config.attention_bias);
        assert_eq!(files.checkpoint, TensorType::Q4_1);
        let goldens: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/goldens/smollm2-q4_1.json")).unwrap();
        let prompt: Vec<u32> = serde_json::from_value(goldens[0]["prompt"].clone()).unwrap();
        assert_eq!(files.tokenizer.encode(&ask(&files), false).unwrap(), prompt);
    }
}
