//! Texts of models: in each format, the parts of an answer do not depend on how the text is cut.

use baton::model::answer::{
    AnswerParts, AnswerReader, AnswerRules, ReasoningDelivery, ReasoningFormat, ReasoningStart,
    ToolFormat, ToolFunction,
};
use serde_json::Map;


pub fn run(data: &[u8]) {
    let [kind, length, text @ ..] = data else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let function = ToolFunction { name: "f".into(), parameters: Map::new() };
    let rules = AnswerRules {
        tools: Some(ToolFormat::ALL[*kind as usize % ToolFormat::ALL.len()]),
        functions: [function].into(),
        is_single_call: kind & 64 != 0,
        reasoning: (kind & 128 != 0).then_some(ReasoningFormat::Qwen3),
        delivery: ReasoningDelivery::Pieces,
        has_grammar: false,
        tags: [].into(),
    };
    let at_once = read(&rules, [text]);
    let length = *length as usize % 16 + 1;
    let characters: Vec<char> = text.chars().collect();
    let pieces = characters.chunks(length).map(|piece| piece.iter().collect());
    let pieces: Vec<String> = pieces.collect();
    assert_eq!(read(&rules, pieces.iter().map(String::as_str)), at_once);
}

fn read<'t>(rules: &AnswerRules, pieces: impl IntoIterator<Item = &'t str>) -> AnswerParts {
    let mut reader = AnswerReader::new(rules, ReasoningStart::Outside);
    let mut parts = AnswerParts::default();
    for piece in pieces {
        reader.push(piece, &mut parts);
    }
    reader.finish(&mut parts);
    parts
}
