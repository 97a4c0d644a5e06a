//! The targets. To add one, add its name here, its file beside this one, and its folder in
//! `corpus/`.

mod landing;
mod model_sizes;

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(mod $name;)*

        /// Every target by name.
        pub const ALL: &[(&str, fn(&[u8]))] = &[$((stringify!($name), $name::run)),*];
    };
}

targets! {
    abi,
    answer,
    chat_body,
    completion_body,
    entry,
    etcd,
    gguf_header,
    grammar,
    http_request,
    http_response,
    hub_files,
    message,
    model_config,
    plan,
    prefix,
    safetensors_header,
    shm_offers,
    tcp_frames,
    translation,
    zmtp,
}

/// Targets with slow runs. They wait for threads, compile grammars, create memory files and
/// descriptors, or check every page after every step.
pub const SLOW: &[&str] = &["abi", "grammar", "prefix", "shm_offers", "tcp_frames"];
