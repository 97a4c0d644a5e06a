//! Information about the server, its model and its load, for clients, routers and operators.
//!
//! Thread: `ctl`. Not here: the fields and their names (`api::info`).

use super::{WorkerRoutes, json, nothing_at};
use crate::api::ApiError;
use crate::api::info::{
    ASKED_BY_ROUTER, DRAINING, Load, Loads, ModelCard, ModelInfo, ModelList, RankLoad, ServerInfo,
    VersionInfo,
};
use crate::http::Request;
use crate::net::ConnId;
use crate::server::role_change::RoleChange;
use crate::worker::requests::{Context, RequestTable};

const VERSION: &str = env!("CARGO_PKG_VERSION");

impl WorkerRoutes {
    /// Answers a request for information about this server or its model.
    pub(super) fn serve_info(
        &self,
        conn: ConnId,
        request: &Request,
        table: &RequestTable,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        let about = &self.about;
        let path = request.head.path();
        match path {
            "/v1/models" => {
                let names = &table.config().names;
                // The path is a name, too, but it is no business of clients.
                let is_shown = |name: &&String| names.len() == 1 || **name != about.model_path;
                let shown = names.iter().filter(is_shown);
                json(conn, &ModelList::of(shown.map(|name| self.card(name, request, table))), cx)
            }
            "/server_info" | "/get_server_info" => json(conn, &self.server_info(table), cx),
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
                json(conn, &info, cx)
            }
            "/v1/loads" => {
                let unix = cx.reactor.since_epoch().as_secs_f64();
                json(conn, &Loads::new(self.load(), unix, VERSION), cx)
            }
            "/get_load" => json(conn, &[RankLoad::of(&self.load())], cx),
            "/tokenizer_info" => json(conn, &table.tokenizer_info(), cx),
            "/version" => json(conn, &VersionInfo { version: VERSION }, cx),
            _ => Err(nothing_at(path)),
        }
    }

    /// One name of the model, for this request.
    pub(super) fn card<'a>(
        &'a self,
        name: &'a str,
        request: &Request,
        table: &'a RequestTable,
    ) -> ModelCard<'a> {
        let about = &self.about;
        let is_asked_by_router = request.head.headers.get(ASKED_BY_ROUTER).is_some();
        let for_foreign_router = about.handoff.is_some() && !is_asked_by_router;
        let root = table.config().names.first().map_or(name, String::as_str);
        ModelCard::new((name, root), for_foreign_router, about.started, table.context())
    }

    fn server_info<'a>(&'a self, table: &'a RequestTable) -> ServerInfo<'a> {
        let (terms, about) = (table.config(), &self.about);
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
            context_length: table.context(),
            max_total_tokens: about.pool_tokens,
            max_running_requests: about.max_running,
            page_size: about.page_size,
            role_changes: self.role_change.as_ref().map(RoleChange::changes),
            status: if self.takes_nothing() { DRAINING } else { "ready" },
            handoff: about.handoff.as_ref(),
        }
    }

    pub(super) fn load(&self) -> Load<'_> {
        Load { disagg_mode: self.about.mode, ..self.telemetry.load(self.about.max_running) }
    }
}
