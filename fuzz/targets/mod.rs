//! The targets. To add one: its name here, its file beside this one, its folder in `corpus/`.

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(mod $name;)*

        /// Every target by name.
        pub const ALL: &[(&str, fn(&[u8]))] = &[$((stringify!($name), $name::run)),*];
    };
}

targets! {
    chat_body,
    completion_body,
    gguf_header,
    http_request,
    http_response,
    message,
    safetensors_header,
    zmtp,
}
