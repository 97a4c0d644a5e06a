//! Bodies of `/v1/completions` and `/generate`: an accepted body is within its limits and can be
//! answered; a refused one gets a 4xx status.

use baton::api::{ApiError, Choice, GenerateRequest, Renderer, Sampling, completion, generate};

pub fn run(data: &[u8]) {
    check(completion::parse(data, &Sampling::default()));
    check(generate::parse(data, &Sampling::default()));
}

/// Checks the guarantees of every endpoint for a request.
pub fn check(result: Result<GenerateRequest, ApiError>) {
    let request = match result {
        Ok(request) => request,
        Err(error) => {
            assert!((400..500).contains(&error.status));
            return assert_json(&error.to_json());
        }
    };
    let choices = request.prompts.len() * request.samples;
    assert!((1..=1024).contains(&choices));
    assert!(request.max_tokens.is_none_or(|most| request.min_tokens <= most));
    assert!(request.sampling.temperature >= 0.0 && request.sampling.temperature.is_finite());
    assert!(request.bootstrap.as_ref().is_none_or(|slots| slots.len() == choices));
    assert!(request.rids.is_empty() || request.rids.len() == request.prompts.len());
    let renderer = Renderer::new(&request, "r", 0, request.model.as_deref().unwrap_or("m"));
    let choice = Choice {
        index: 0,
        rid: request.rids.first().map_or("r", String::as_str),
        text: "é",
        reasoning: "",
        calls: &[],
        has_call: false,
        token_ids: &[1],
        positions: &[],
        prompt: &[],
        text_offset: 0,
        prompt_ids: Some(&[1]),
        finish: None,
        usage: Default::default(),
    };
    let mut out = Vec::new();
    renderer.body(&mut out, &[choice], Default::default(), None);
    assert_json(&out);
    out.clear();
    renderer.chunk(&mut out, &choice, None);
    assert_json(&out);
    assert!(!out.contains(&b'\n'), "an event's data is one line");
}

fn assert_json(bytes: &[u8]) {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).expect("answers are JSON");
}
