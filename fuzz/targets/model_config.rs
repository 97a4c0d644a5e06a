//! Fields of `config.json`, with all kinds of layers. An accepted configuration has sizes that fit.

use super::model_sizes;
use baton::model::hf::config::parse;
use baton::model::hf::json_object::Object;
use std::path::Path;

pub fn run(data: &[u8]) {
    let object = Object::of_bytes(Path::new("config.json"), data.to_vec());
    let Ok(config) = object.and_then(|object| parse(&object)) else { return };
    model_sizes::check(&config);
}
