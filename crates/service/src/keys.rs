use stockade_model::{ApiKeyId, Secret, WorkspaceId};

use crate::{Principal, Service, ServiceError, error::store_error};

const KEY_PREFIX: &str = "e2b_";
const KEY_BYTES: usize = 20;
/// The name of the key in the key file; no other key has it.
const FILE_KEY: &str = "first";
/// Longer texts are not keys; nobody makes us hash megabytes.
const LONGEST_KEY: usize = 256;

impl Service {
    /// Who an API key belongs to; `None`: nobody.
    ///
    /// # Errors
    /// The store fails.
    pub async fn authenticate(&self, key: &str) -> Result<Option<Principal>, ServiceError> {
        if key.is_empty() || key.len() > LONGEST_KEY {
            return Ok(None);
        }
        let found = self.store().find_api_key(key).await.map_err(store_error)?;
        Ok(found.map(|(workspace, key)| Principal { workspace, key }))
    }

    /// The workspace every deployment has.
    ///
    /// # Errors
    /// The store fails.
    pub async fn default_workspace(&self) -> Result<WorkspaceId, ServiceError> {
        self.store().default_workspace().await.map_err(store_error)
    }

    /// The workspace of a name; made if there is none.
    ///
    /// # Errors
    /// The store fails.
    pub async fn workspace(&self, name: &str) -> Result<WorkspaceId, ServiceError> {
        self.store().workspace(name).await.map_err(store_error)
    }

    /// A new key. Its text is in the answer and nowhere else.
    ///
    /// # Errors
    /// The name is the key file's, or the store fails.
    pub async fn create_api_key(
        &self,
        workspace: &WorkspaceId,
        name: &str,
    ) -> Result<(ApiKeyId, Secret), ServiceError> {
        if name == FILE_KEY {
            let problem = format!("{FILE_KEY:?} is the name of the key in the server's key file");
            return Err(ServiceError::Invalid { field: "name", problem });
        }
        let key = Secret::random_hex(KEY_PREFIX, KEY_BYTES);
        Ok((self.store().insert_api_key(workspace, name, &key).await.map_err(store_error)?, key))
    }

    /// Accepts the key in the server's key file, and no longer the one that was in it before. Repeatable.
    ///
    /// # Errors
    /// The key is another workspace's, or the store fails.
    pub async fn take_key_file(&self, workspace: &WorkspaceId, key: &Secret) -> Result<ApiKeyId, ServiceError> {
        self.store().replace_api_key(workspace, FILE_KEY, key).await.map_err(store_error)
    }

    /// Makes a key of the caller's workspace useless; false: there is no such key.
    ///
    /// # Errors
    /// The store fails.
    pub async fn revoke_api_key(&self, who: &Principal, key: &ApiKeyId) -> Result<bool, ServiceError> {
        self.store().revoke_api_key(&who.workspace, key).await.map_err(store_error)
    }
}
