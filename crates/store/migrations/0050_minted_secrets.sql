-- How a secret's value is come by; '' is a value that is kept. Otherwise JSON of the service's, with nothing secret in
-- it; `value` is then what the value is got with.
ALTER TABLE secrets ADD COLUMN origin TEXT NOT NULL DEFAULT '';
