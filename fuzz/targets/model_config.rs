//! Fields of `config.json`, with all kinds of layers. A configuration that is accepted has sizes
//! that no product overflows: its first tensors can be listed, and its pages have a layout.

use baton::kv::layout::KvDtype;
use baton::model::hf::config::parse;
use baton::model::hf::json_object::Object;
use baton::model::inventory;
use std::path::Path;

/// Tensors that are looked at. A hostile file can name a million.
const TENSORS: usize = 200;

pub fn run(data: &[u8]) {
    let object = Object::of_bytes(Path::new("config.json"), data.to_vec());
    let Ok(config) = object.and_then(|object| parse(&object)) else { return };
    for tensor in inventory::tensors(&config).take(TENSORS) {
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
