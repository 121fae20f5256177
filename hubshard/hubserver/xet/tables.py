"""What the database knows of Xet storage."""

from __future__ import annotations

from hubshard.hubserver.db import Schema

__all__ = ["XET"]

# Hashes are blobs of 32 bytes; sha256 is lower-case hex, as in the core tables.
# xet_files.terms: packed records, see files.py; a file's number is never used again. xet_sha256: pairs that the
# server has checked itself. xet_file_xorbs: which xorbs a file needs. xet_uploads: which repo uploaded a xorb, in
# order: what its uploads may be deduplicated against. xet_chunks: where the chunks are that clients ask for.
XET = Schema(
    "xet",
    (
        """
        CREATE TABLE xet_files (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            file_hash BLOB NOT NULL UNIQUE,
            nbytes INTEGER NOT NULL,
            terms BLOB NOT NULL,
            touched_at REAL NOT NULL
        );
        CREATE TABLE xet_sha256 (
            sha256 TEXT NOT NULL,
            file_hash BLOB NOT NULL REFERENCES xet_files (file_hash) ON DELETE CASCADE,
            PRIMARY KEY (sha256, file_hash)
        ) WITHOUT ROWID;
        CREATE INDEX xet_sha256_by_file ON xet_sha256 (file_hash);
        CREATE TABLE xet_file_xorbs (
            xorb BLOB NOT NULL,
            file_hash BLOB NOT NULL REFERENCES xet_files (file_hash) ON DELETE CASCADE,
            PRIMARY KEY (xorb, file_hash)
        ) WITHOUT ROWID;
        CREATE INDEX xet_file_xorbs_by_file ON xet_file_xorbs (file_hash);
        CREATE TABLE xet_uploads (
            number INTEGER PRIMARY KEY,
            repo_id INTEGER NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
            xorb BLOB NOT NULL,
            UNIQUE (repo_id, xorb)
        );
        CREATE INDEX xet_uploads_by_xorb ON xet_uploads (xorb);
        CREATE TABLE xet_chunks (
            chunk BLOB NOT NULL,
            xorb BLOB NOT NULL,
            PRIMARY KEY (chunk, xorb)
        ) WITHOUT ROWID;
        CREATE INDEX xet_chunks_by_xorb ON xet_chunks (xorb);
        """,
    ),
)
