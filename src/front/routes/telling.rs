//! What the server tells of itself, its model and what it has to do, for clients, routers and operators.
//!
//! Thread: `ctl`. Not here: the fields and their names (`openai::info`).

use super::{Routes, json, nothing_at};
use crate::front::generations::{Generations, Way};
use crate::front::openai::ApiError;
use crate::front::openai::info::{
    DRAINING, Load, Loads, ModelCard, ModelInfo, ModelList, RankLoad, ServerInfo, Version,
};
use crate::front::turning::Turning;
use crate::net::ConnId;
use std::time::{SystemTime, UNIX_EPOCH};

const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Routes {
    /// Answers a question about this server or its model.
    pub(super) fn tell(
        &self,
        conn: ConnId,
        path: &str,
        generations: &Generations,
        way: &mut Way<'_>,
    ) -> Result<(), ApiError> {
        let about = &self.about;
        match path {
            "/v1/models" => {
                let names = generations.terms().names.iter();
                json(conn, &ModelList::of(names.map(|name| self.card(name, generations))), way)
            }
            "/server_info" | "/get_server_info" => json(conn, &self.server_info(generations), way),
            "/model_info" | "/get_model_info" => {
                let info = ModelInfo {
                    model_path: &about.model_path,
                    tokenizer_path: &about.model_path,
                    is_generation: true,
                    has_image_understanding: false,
                    has_audio_understanding: false,
                    model_type: about.model_type,
                    architectures: &about.architectures,
                };
                json(conn, &info, way)
            }
            "/v1/loads" => {
                let unix = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0.0, |since| since.as_secs_f64());
                json(conn, &Loads::new(self.load(), unix, VERSION), way)
            }
            "/get_load" => json(conn, &[RankLoad::of(&self.load())], way),
            "/version" => json(conn, &Version { version: VERSION }, way),
            _ => Err(nothing_at(path)),
        }
    }

    pub(super) fn card<'a>(&'a self, name: &'a str, generations: &Generations) -> ModelCard<'a> {
        let about = &self.about;
        ModelCard::new(name, &about.model_path, about.started, generations.context())
    }

    fn server_info<'a>(&'a self, generations: &'a Generations) -> ServerInfo<'a> {
        let (terms, about) = (generations.terms(), &self.about);
        ServerInfo {
            model_path: &about.model_path,
            served_model_name: &terms.names[0],
            disaggregation_mode: about.mode,
            disaggregation_bootstrap_port: about.bootstrap_port,
            tp_size: 1,
            dp_size: 1,
            pp_size: 1,
            load_balance_method: "follow_bootstrap_room",
            version: VERSION,
            is_embedding: false,
            context_length: generations.context(),
            max_total_tokens: about.pool_tokens,
            max_running_requests: about.max_running,
            page_size: about.page_size,
            role_changes: self.turning.as_ref().map(Turning::changes),
            status: if self.takes_nothing() { DRAINING } else { "ready" },
            handoff: about.handoff.as_ref(),
        }
    }

    pub(super) fn load(&self) -> Load<'_> {
        Load { disagg_mode: self.about.mode, ..self.telemetry.load(self.about.max_running) }
    }
}
