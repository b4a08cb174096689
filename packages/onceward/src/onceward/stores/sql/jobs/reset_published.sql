-- The broker has lost all messages: published jobs are published again, with the next message id.
-- Returns how many. Rows that another transaction has locked are skipped.
CREATE OR REPLACE FUNCTION onceward_reset_published() RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_tenant text;
    v_rows bigint;
    v_reset bigint := 0;
BEGIN
    FOR v_tenant IN
        SELECT DISTINCT tenant FROM onceward_jobs WHERE published_at IS NOT NULL
    LOOP
        UPDATE onceward_jobs AS job
           SET published_at = NULL
          FROM (SELECT id FROM onceward_jobs
                 WHERE tenant = v_tenant AND published_at IS NOT NULL
                   FOR UPDATE SKIP LOCKED) AS free
         WHERE job.tenant = v_tenant AND job.id = free.id;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        v_reset := v_reset + v_rows;
    END LOOP;
    RETURN v_reset;
END $$;
