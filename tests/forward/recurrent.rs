//! Recurrent layers against the reference, and against themselves with every division of the same
//! work.

use crate::model::{Model, delta, hybrid, recurrent};
use crate::run::{How, Runner, bits};
use crate::{check_neighbours, f32_model, how, same_bits, some_tokens, worst};
use baton::kv::layout::KvDtype;
use baton::model::config::ModelConfig;
use baton::model::forward::batch::Logits;
use baton::model::forward::cpu::available_kernels;
use baton::model::recurrent_config::{MambaConfig, MambaNorm};
use baton::model::tensor::TensorType;

fn with(change: impl FnOnce(&mut MambaConfig)) -> ModelConfig {
    let mut config = recurrent();
    change(config.mamba.as_mut().unwrap());
    config
}

#[test]
fn each_shape_of_state_agrees_with_the_reference() {
    for config in [
        recurrent(),
        // Sizes of published models, with fewer heads.
        with(|mamba| (mamba.heads, mamba.head_dim, mamba.state, mamba.groups) = (4, 64, 128, 1)),
        with(|mamba| (mamba.heads, mamba.head_dim, mamba.groups) = (8, 16, 8)),
        with(|mamba| (mamba.state, mamba.conv_width) = (1, 2)),
        with(|mamba| (mamba.conv_width, mamba.conv_bias) = (7, false)),
        with(|mamba| (mamba.input_bias, mamba.output_bias) = (true, true)),
        with(|mamba| mamba.norm = MambaNorm::None),
        with(|mamba| mamba.norm = MambaNorm::BeforeGate),
    ] {
        let model = f32_model(config);
        let worst = worst(&model, 300, KvDtype::F32);
        assert!(worst < 1e-3, "{:?}: {worst}", model.config.mamba);
    }
}

#[test]
fn recurrent_parts_beside_attention_agree_with_the_reference() {
    for config in [hybrid(), ModelConfig { multipliers: None, ..hybrid() }, delta()] {
        let model = f32_model(config);
        let worst = worst(&model, 150, KvDtype::F32);
        assert!(worst < 1e-3, "{:?}: {worst}", model.config.multipliers);
    }
}

#[test]
fn bits_of_recurrent_layers_do_not_depend_on_chunks_or_threads() {
    let narrow = with(|mamba| (mamba.head_dim, mamba.state, mamba.conv_width) = (8, 2, 5));
    same_bits(&f32_model(recurrent()), 300, &[1, 3, 37, 250, 256, 257]);
    same_bits(&f32_model(narrow), 60, &[1, 2, 3, 7]);
    same_bits(&f32_model(hybrid()), 300, &[1, 37, 250, 257]);
    same_bits(&f32_model(delta()), 300, &[1, 37, 250, 257]);
    let wide = ModelConfig { hidden: 96, ..with(|mamba| mamba.head_dim = 16) };
    same_bits(&Model::random(wide, 21, |_| TensorType::Q8_0), 60, &[1, 7, 59]);
}

#[test]
fn bits_of_recurrent_layers_do_not_depend_on_neighbours() {
    check_neighbours(&f32_model(recurrent()));
    check_neighbours(&f32_model(hybrid()));
    check_neighbours(&f32_model(delta()));
}

/// A row whose mask was late is computed once more. Its state stays, and so do its logits.
#[test]
fn a_token_that_is_computed_again_changes_neither_state_nor_logits() {
    let tokens = some_tokens(20, recurrent().vocab);
    let models = [recurrent(), hybrid(), delta()].map(f32_model);
    for (kernel, model) in
        available_kernels().iter().flat_map(|kernel| models.iter().map(move |it| (kernel, it)))
    {
        let mut runner = Runner::new(model, &How { threads: 1, ..how(*kernel) });
        let mut sequence = runner.sequence(&tokens);
        for count in [1, 1, 5, 1, 1, 9, 1] {
            runner.push(&mut sequence, count, Logits::Last);
            let expected = (bits(&runner.step()), runner.kv_bytes(&sequence));
            for _ in 0..2 {
                runner.push_again(&sequence);
                let again = (bits(&runner.step()), runner.kv_bytes(&sequence));
                assert!(again == expected, "{kernel}, token {}", sequence.done);
            }
        }
    }
}

/// The first token of a sequence does not see what another one left on its pages.
#[test]
fn a_state_begins_empty_on_used_pages() {
    let model = f32_model(recurrent());
    let [first, second] = [40, 25].map(|count| some_tokens(count, model.config.vocab));
    for kernel in available_kernels() {
        let expected = bits(&Runner::new(&model, &how(*kernel)).logits(&second, 7));
        let mut runner = Runner::new(&model, &how(*kernel));
        runner.logits(&first, 40);
        assert!(bits(&runner.logits(&second, 7)) == expected, "{kernel}");
    }
}
