//! Checks of an accepted configuration: no product of its sizes overflows. Its first tensors can be
//! listed, and its pages have a layout.

use baton::kv::layout::KvDtype;
use baton::model::config::ModelConfig;
use baton::model::inventory;

/// Tensors that are looked at. A hostile file can name a million.
const TENSORS: usize = 200;

pub fn check(config: &ModelConfig) {
    for tensor in inventory::tensors(config).take(TENSORS) {
        assert!(tensor.rows > 0 && tensor.cols > 0, "{} has a size", tensor.name);
        assert!(tensor.rows.checked_mul(tensor.cols).is_some(), "{} has a size", tensor.name);
    }
    for page_size in [1, 16, 256] {
        for dtype in [KvDtype::F32, KvDtype::F16] {
            let Ok((groups, layout)) = config.kv_memory(page_size, dtype) else { continue };
            let counts = groups.counts();
            assert_eq!(groups.model_layers(), config.layers);
            assert_eq!(counts.state_pages > 0, config.state_shape().is_some());
            assert!(counts.pages(1, 1) > 0 && layout.page_bytes() > 0);
            assert!(groups.places().all(|place| place.group < counts.total()));
            if let Some(state) = groups.state() {
                let shape = state.shape();
                let last = state.place(shape.layers - 1, shape.pieces - 1);
                assert_eq!(last.page + 1, counts.state_pages as usize);
                assert!(last.offset + shape.piece_bytes() <= layout.page_bytes());
            }
        }
    }
}
