// Rebuilds a table from an archive as readers of Laredo's layout do. This is a reader of our own, made
// from the published rules: it derives every name, orders positions as LSNs, keeps rows by the text that
// Go prints for their keys, and looks at no field that Laredo does not write. It also writes one archive
// by those rules.
//
// usage: laredo read FOLDER FORMAT KEY_FIELDS POSITION
//
//	laredo write FOLDER
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

type row map[string]any

type change struct {
	Action string `json:"action"`
	Key    string `json:"key"`
	Old    row    `json:"old"`
	New    row    `json:"new"`
}

type artifact struct {
	Kind         string    `json:"kind"`
	Epoch        int64     `json:"epoch"`
	FromPosition *string   `json:"from_position"`
	ToPosition   string    `json:"to_position"`
	CreatedAt    time.Time `json:"created_at"`
	RowCount     int       `json:"row_count"`
	ChangeCount  int       `json:"change_count"`
	Formats      map[string]struct {
		URI       string `json:"uri"`
		SizeBytes int    `json:"size_bytes"`
	} `json:"formats"`
}

type manifest struct {
	ManifestVersion int        `json:"manifest_version"`
	Table           string     `json:"table"`
	Epoch           int64      `json:"epoch"`
	UpdatedAt       time.Time  `json:"updated_at"`
	HeadPosition    string     `json:"head_position"`
	Artifacts       []artifact `json:"artifacts"`
	Columns         []struct {
		Name, Type                         string
		Nullable, PrimaryKey               bool
		OrdinalPosition, PrimaryKeyOrdinal int
	} `json:"columns"`
}

// Bytes of a line and of a message that Laredo's decoders take.
const (
	lineMax    = 16 << 20
	messageMax = 4 << 20
)

var extensions = map[string]string{"jsonl": ".jsonl", "protobuf": ".pb"}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 2 && args[0] == "write" {
		return writeArchive(args[1])
	}
	if len(args) != 5 || args[0] != "read" {
		return errors.New("usage: laredo read FOLDER FORMAT KEY_FIELDS POSITION | laredo write FOLDER")
	}
	folder, format, keyFields, position := args[1], args[2], strings.Split(args[3], ","), args[4]
	data, err := os.ReadFile(filepath.Join(folder, "manifest.json"))
	if err != nil {
		return err
	}
	var m manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return err
	}
	base, diffs := plan(m, position)
	if base == nil {
		return fmt.Errorf("no base at or before %s", position)
	}
	rows, reached, err := rebuild(folder, format, keyFields, *base, diffs)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{
		"table": m.Table, "head": m.HeadPosition, "position": reached, "rows": rows,
	})
}

// plan returns the newest base that is not after the position, and the chain of diffs from it: links
// are equal texts, whatever the epoch.
func plan(m manifest, position string) (*artifact, []artifact) {
	var base *artifact
	next := map[string]artifact{}
	for i, a := range m.Artifacts {
		if a.Kind == "diff" {
			next[*a.FromPosition] = a
		} else if lsn(a.ToPosition) <= lsn(position) &&
			(base == nil || lsn(a.ToPosition) >= lsn(base.ToPosition)) {
			base = &m.Artifacts[i]
		}
	}
	var chain []artifact
	if base == nil {
		return nil, nil
	}
	for at := base.ToPosition; ; {
		diff, found := next[at]
		if !found || lsn(diff.ToPosition) > lsn(position) {
			return base, chain
		}
		chain = append(chain, diff)
		at = diff.ToPosition
	}
}

// lsn orders positions; text that is not an LSN is before all others.
func lsn(position string) int64 {
	high, low, found := strings.Cut(position, "/")
	h, err1 := strconv.ParseUint(high, 16, 32)
	l, err2 := strconv.ParseUint(low, 16, 32)
	if !found || err1 != nil || err2 != nil {
		return -1
	}
	return int64(h<<32 | l)
}

func objectKey(a artifact, extension string) string {
	clean := strings.NewReplacer("/", "_", ":", "_", " ", "_")
	if a.Kind == "snapshot" {
		return fmt.Sprintf("epoch=%d/snapshot-%s%s", a.Epoch, clean.Replace(a.ToPosition), extension)
	}
	from, to := clean.Replace(*a.FromPosition), clean.Replace(a.ToPosition)
	return fmt.Sprintf("epoch=%d/diff-%s-%s%s", a.Epoch, from, to, extension)
}

func rowKey(r row, keyFields []string) string {
	if len(keyFields) == 1 {
		return fmt.Sprintf("%v", r[keyFields[0]])
	}
	parts := make([]any, len(keyFields))
	for i, field := range keyFields {
		parts[i] = r[field]
	}
	return fmt.Sprintf("%v", parts)
}

func rebuild(
	folder, format string, keyFields []string, base artifact, diffs []artifact,
) ([]row, string, error) {
	content, err := read(folder, format, base)
	if err != nil {
		return nil, "", err
	}
	found, err := decodeRows(format, content)
	if err != nil {
		return nil, "", err
	}
	table := map[string]row{}
	for _, r := range found {
		table[rowKey(r, keyFields)] = r
	}
	if len(table) != base.RowCount {
		return nil, "", fmt.Errorf("%d keys for %d rows", len(table), base.RowCount)
	}
	reached := base.ToPosition
	for _, diff := range diffs {
		content, err := read(folder, format, diff)
		if err != nil {
			return nil, "", err
		}
		changes, err := decodeChanges(format, content)
		if err != nil {
			return nil, "", err
		}
		for _, c := range changes {
			if err := apply(table, c, keyFields); err != nil {
				return nil, "", err
			}
		}
		reached = diff.ToPosition
	}
	rows := make([]row, 0, len(table))
	for _, r := range table {
		rows = append(rows, r)
	}
	return rows, reached, nil
}

func apply(table map[string]row, c change, keyFields []string) error {
	image := c.New
	switch c.Action {
	case "TRUNCATE":
		for key := range table {
			delete(table, key)
		}
		return nil
	case "INSERT", "UPDATE":
		table[c.Key] = c.New
	case "DELETE":
		delete(table, c.Key)
		image = c.Old
	default:
		return fmt.Errorf("unknown action %q", c.Action)
	}
	if made := rowKey(image, keyFields); made != c.Key {
		return fmt.Errorf("key %q of a change is %q by its row", c.Key, made)
	}
	return nil
}

// read takes the one file of an artifact, at the derived name; `uri` must name the same file.
func read(folder, format string, a artifact) ([]byte, error) {
	files, found := a.Formats[format]
	if !found {
		return nil, fmt.Errorf("no %s in %s of epoch %d", format, a.Kind, a.Epoch)
	}
	key := objectKey(a, extensions[format])
	if !strings.HasSuffix(files.URI, "/"+key) {
		return nil, fmt.Errorf("uri %s is not that of %s", files.URI, key)
	}
	content, err := os.ReadFile(filepath.Join(folder, key))
	if err == nil && len(content) != files.SizeBytes {
		return nil, fmt.Errorf("%s has %d bytes, not %d", key, len(content), files.SizeBytes)
	}
	return content, err
}

func decodeRows(format string, content []byte) ([]row, error) {
	var rows []row
	err := each(format, content, func(part []byte) error {
		var r row
		if format == "jsonl" {
			if err := json.Unmarshal(part, &r); err != nil {
				return err
			}
		} else if err := fields(part, func(number int, value any) error {
			decoded, err := structOf(value.([]byte))
			r = decoded
			return err
		}); err != nil {
			return err
		}
		rows = append(rows, r)
		return nil
	})
	return rows, err
}

func decodeChanges(format string, content []byte) ([]change, error) {
	var changes []change
	err := each(format, content, func(part []byte) error {
		var c change
		if format == "jsonl" {
			if err := json.Unmarshal(part, &c); err != nil {
				return err
			}
		} else if err := fields(part, func(number int, value any) (err error) {
			switch number {
			case 1:
				c.Action = string(value.([]byte))
			case 2:
				c.Key = string(value.([]byte))
			case 3:
				c.Old, err = structOf(value.([]byte))
			case 4:
				c.New, err = structOf(value.([]byte))
			}
			return err
		}); err != nil {
			return err
		}
		changes = append(changes, c)
		return nil
	})
	return changes, err
}

// each calls take with every line, or with every message after its length.
func each(format string, content []byte, take func([]byte) error) error {
	if format == "jsonl" {
		lines := bufio.NewScanner(bytes.NewReader(content))
		lines.Buffer(make([]byte, 0, 64<<10), lineMax)
		for lines.Scan() {
			if len(lines.Bytes()) == 0 {
				continue
			}
			if err := take(lines.Bytes()); err != nil {
				return err
			}
		}
		return lines.Err()
	}
	for len(content) > 0 {
		size, rest, err := varint(content)
		if err != nil || size > messageMax || size > uint64(len(rest)) {
			return fmt.Errorf("a message of %d bytes is cut or too large", size)
		}
		if err := take(rest[:size]); err != nil {
			return err
		}
		content = rest[size:]
	}
	return nil
}
