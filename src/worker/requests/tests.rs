//! Tests of the table's invariants.

use super::*;
use crate::api::tokenize::DetokenizeRequest;
use crate::config::parsers::{ReasoningParser, ToolCallParser};
use crate::ids::WorkerId;
use crate::model::answer::AnswerStyle;
use crate::model::grammar::GrammarCompiler;
use crate::model::tokenizer::Tokenizer;
use crate::obs::registry::Registry;
use crate::sched::masks::{self, MaskMetrics};
use crate::stdx::event_count::EventCount;
use crate::stdx::failpoint::panic_of;
use crate::sys::clock::Clock;
use std::path::Path;

impl RequestTable {
    /// The table of a mixed process without workers, with the tokenizer of a fixture.
    pub(in crate::worker) fn without_workers() -> RequestTable {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama-f32");
        let tokenizer = Tokenizer::from_hf(&model, 384).unwrap();
        let grammars = GrammarCompiler::new(tokenizer.vocab_size(), &[]);
        let (chat, clock) = (None, Clock::default());
        let style = AnswerStyle::new(
            chat.as_ref(),
            &tokenizer,
            ToolCallParser::Auto,
            ReasoningParser::Auto,
        );
        let text = Arc::new(TextProcessor {
            tokenizer,
            chat,
            context: 64,
            clock,
            grammars,
            style,
            trusts_templates: false,
        });
        let queue = TextQueue::start(text.clone(), 4, Arc::new(EventCount::new(|| ()))).unwrap();
        let config = ServingConfig {
            has_priorities: false,
            names: vec!["llama".into()],
            choices: 1,
            eos: Vec::new(),
            placement: Placement::Mixed(Vec::new()),
        };
        let bell = || Arc::new(EventCount::new(|| ()));
        let metrics = MaskMetrics::register(&mut Registry::default());
        let (masks, _) = masks::masks((0, 0), 1, (bell(), bell()), (metrics, Clock::default()));
        RequestTable::new(config, text, queue, Vec::new(), masks)
    }
}

#[test]
fn a_flush_that_runs_is_work() {
    let mut table = RequestTable::without_workers();
    assert!(table.is_idle());
    table.flushes.begin(ConnId::outside(1), &[WorkerId(0)], Instant::now()).unwrap();
    assert!(!table.is_idle(), "a drain waits for it");
    table.flushes.gone(ConnId::outside(1));
    assert!(table.is_idle());
}

#[test]
fn invariants_find_a_connection_that_leads_to_a_request_that_is_over() {
    let convert = |table: &mut RequestTable, conn: u32| {
        let asked = DetokenizeRequest { model: None, tokens: vec![1] };
        table.convert(ConnId::outside(conn), TextTask::Detokenize(asked)).unwrap();
        table.invariants();
    };
    let mut table = RequestTable::without_workers();
    convert(&mut table, 1);
    assert_eq!(table.converted(RequestKey(0)), Some(ConnId::outside(1)));
    table.invariants();

    convert(&mut table, 2);
    let message = panic_of("connection outlives its request", || {
        assert_eq!(table.converted(RequestKey(1)), Some(ConnId::outside(2)));
        table.invariants();
    });
    assert!(message.contains("a connection leads to one request"), "{message}");
}
